"""GPT: embedding, megatron-core's transformer block with our layers, and output layer, built from our configuration."""

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megatron.lm.config import LINEARS, ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.sections.baselines import PeerRecipe
from megatron.lm.config.sections.precision import saved_activations
from megatron.lm.model.attention import count_context, document_mask
from megatron.lm.model.initial import draw_weights
from megatron.lm.model.linear import HeadGemm, connect, layer_linears, output_linear
from megatron.lm.model.moe.layer import convert_experts
from megatron.lm.model.peer import block_spec as peer_block_spec
from megatron.lm.model.peer import check_available, core_settings
from megatron.lm.model.spec import LayerOptions, block_spec
from megatron.lm.processes.grid import ALONE, Grid, Ranks
from megatron.lm.processes.process_groups import device
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.vocabulary_loss import COMPUTE, linear_cross_entropy
from msamp.parallel.vocabulary import vocabulary_parallel_cross_entropy

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe


class GPT(LanguageModule):
    """Embedding, megatron-core's transformer block with our layers, and output layer, each on its pipeline stage. Parameters have the names
    of megatron-core's GPTModel, which it deprecates, and so have checkpoints.

    `forward(tokens, position_ids, None)` takes [b, s] int64 and returns logits [b, s, padded vocabulary / tensor-parallel size]; with
    `labels` [b, s] int64 the loss of every token, [b, s] FP32; with `labels` and `loss_mask` [b, s] FP32 the sum of the losses times the
    mask, FP32 0-dim, computed in chunks so that the full logits are never in memory. Pipeline stages before the last return hidden states
    [s, b, h].

    Args:
        config: megatron-core's configuration.
        layers: spec of the transformer block and its final norm.
        vocab_size: padded.
        model: for positions, tied embeddings and the objective.
        pre_process, post_process: whether the part has the embedding, and the final norm and the output layer.
        vp_stage: index of the chunk of an interleaved pipeline stage.
        output_linear: class of the output layer (LM head), constructed as megatron-core's `ColumnParallelLinear`.
        head_precision: of the LM head's GEMMs for a masked loss (`vocabulary_loss.PRECISIONS`); returned logits never use FP8.
    """

    embedding: LanguageModelEmbedding
    output_layer: ColumnParallelLinear

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        vocab_size: int,
        model: ModelConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
        output_linear: type[ColumnParallelLinear] = ColumnParallelLinear,
        head_precision: str = COMPUTE,
    ) -> None:
        super().__init__(config)
        self.head_precision, self.causal = head_precision, model.objective == "causal-lm"
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = not model.untie_embeddings_and_output_weights
        self.position_embedding_type, self.vocab_size = model.position_embedding_type, vocab_size
        self.model_type = ModelType.encoder_or_decoder  # which megatron-core's schedules ask for
        self._angles: dict[int, Tensor] = {}
        tp = self.pg_collection.tp
        if pre_process:
            self.embedding = LanguageModelEmbedding(config, vocab_size, model.max_positions, self.position_embedding_type, tp_group=tp)
            if hasattr(self.embedding, "position_embeddings"):
                # megatron-core creates this layer in FP32, whatever params_dtype is, and on the CPU.
                self.embedding.position_embeddings.to(device(), config.params_dtype)
        if self.position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                model.rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
                rotary_base=model.rotary_base,
                rope_scaling=model.use_rope_scaling,
                rope_scaling_factor=model.rope_scaling_factor,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
        self.decoder = TransformerBlock(
            config, layers, pre_process=pre_process, post_process=post_process, pg_collection=self.pg_collection, vp_stage=vp_stage
        )
        if post_process:
            self.output_layer = output_linear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=pre_process and self.share_embeddings_and_output_weights,
                tp_group=tp,
            )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()
        for module in self.modules():
            if hasattr(module, "finish_init"):  # Transformer Engine's, of a baseline
                module.finish_init(None)

    def set_input_tensor(self, input_tensor: list[Tensor | None] | Tensor | None) -> None:
        """Set the hidden states [s, b, h] that a stage gets from the one before; megatron-core's schedules pass a list of one."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """As megatron-core's GPTModel, without the extra state of the output layer, which is empty."""
        entries: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        entries.pop(f"{prefix}output_layer._extra_state", None)
        return entries

    def hidden_states(self, tokens: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return this stage's hidden states [s, b, h], on the last stage after the final norm: the input of the output layer.

        The rotary angles [s, 1, 1, r] of a sequence length are the same tensor for the life of the model: megatron-core only caches the
        last 32 calls over all models. The tables that CUDA graphs read live as long as their angles (`cos_sin`).

        Args:
            tokens, position_ids: [b, s] int64.
            attention_mask: for `SDPAttention.forward`; for encoders bool [b, 1, 1, s], True at tokens to ignore, such as padding.
        """
        embedded = self.embedding(tokens, position_ids) if self.pre_process else None
        rotary: Tensor | None = None
        if self.position_embedding_type == "rope":
            length = self.rotary_pos_emb.get_rotary_seq_len(None, self.decoder, embedded, self.config, None)
            rotary = self.rotary_pos_emb(length)
            rotary = self._angles.setdefault(rotary.shape[0], rotary)
        return self.decoder(hidden_states=embedded, attention_mask=attention_mask, rotary_pos_emb=rotary)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        hidden = self.hidden_states(tokens, position_ids, attention_mask)
        if not self.post_process:
            return hidden
        if labels is not None and loss_mask is not None:
            return self._loss_sum(hidden, labels, loss_mask)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight)
        return logits.transpose(0, 1).contiguous() if labels is None else token_loss(logits, labels)

    def document_mask(self, documents: Tensor) -> Tensor:
        """Return the attention mask for `forward` in which tokens attend only to their own document; documents: [b, s] int."""
        dtype = self.config.params_dtype if documents.is_cuda else torch.float32  # as `SDPAttention` computes
        return document_mask(documents, causal=self.causal, dtype=dtype)

    def _loss_sum(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """hidden_states [s, b, h], with sequence parallelism this rank's slice of s, labels and loss_mask [b, s] -> the masked sum, FP32
        0-dim."""
        head = self.output_layer
        for hook in head._forward_pre_hooks.values():  # ZeRO's: the weight may still be being gathered
            hook(head, (hidden_states,))
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else head.weight
        rows = (labels.t().reshape(-1), loss_mask.t().reshape(-1))
        tokens, group = hidden_states.flatten(0, 1), self.pg_collection.tp
        if group.size() == 1:
            return linear_cross_entropy(tokens, weight, *rows, precision=self.head_precision)[0]
        peers = head.peers if isinstance(head, HeadGemm) and head.peers is not None else Peers(group, WireBytes())
        return vocabulary_parallel_cross_entropy(
            tokens, weight, *rows, peers, sequence_parallel=self.config.sequence_parallel, precision=self.head_precision
        )[0]


def transformer_config(model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, recipe: "Recipe") -> TransformerConfig:
    """Return megatron-core's configuration of the model, with parameters in `recipe.compute_dtype`."""
    stages = parallel.virtual_stages(model.num_layers)
    experts: dict[str, Any] = {}
    if model.num_experts is not None:
        experts = {f.name: getattr(model, f.name) for f in fields(model) if f.name.startswith("moe_")}
        layers = [int(n in model.moe_layers) for n in range(model.num_layers)]
        experts |= {"num_moe_experts": model.num_experts, "moe_layer_freq": layers, "moe_ffn_hidden_size": model.expert_size}
    settings = functools.partial(
        TransformerConfig,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_size,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        # megatron-core requires one of these, but applies the spec's activation: GELU in its tanh form, squared ReLU.
        activation_func={"swiglu": functional.silu, "squared-relu": functional.relu, "gelu": functional.gelu}[model.activation],
        # With this flag MLP applies the spec's activation to fc1's output with bias, both halves at once.
        use_te_activation_func=True,
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        # `draw_weights` fills the weights instead.
        init_method=nn.init.zeros_,
        embedding_init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        recompute_modules=list(training.recompute_modules) or None,
        params_dtype=recipe.compute_dtype,
        fp16=recipe.compute_dtype is torch.float16,
        bf16=recipe.compute_dtype is torch.bfloat16,
        pipeline_dtype=recipe.compute_dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        virtual_pipeline_model_parallel_size=stages,
        sequence_parallel=parallel.sequence_parallel,
        # Over gloo, batched point-to-point communication gives interleaved stages wrong gradients.
        overlap_p2p_comm=stages is not None,
        batch_p2p_comm=stages is None,
        gradient_accumulation_fusion=False,
        deterministic_mode=training.deterministic,  # the embedding's backward accumulates in a fixed order
        # This would run torch.compile for one addition: it saves well under 1 % of a step on a GPU and requires a C compiler everywhere.
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        # The whole layer; the default means the same but triggers a deprecation warning. megatron-core 0.18 renamed the field.
        **{"cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope": []},
        **experts,
    )
    return settings(**core_settings(recipe, model))


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    training: TrainingConfig,
    recipe: "Recipe",
    vocab_size: int,
    vp_stage: int | None = None,
    sent: WireBytes | None = None,
) -> GPT:
    """Build this rank's part of the model on its device; requires `process_groups.initialize`.

    Initial weights depend on the seed and the model's shape, not on the parallel layout, nor on the recipe beyond rounding. The vocabulary
    is padded (`ModelConfig.padded_vocab_size`).

    Args:
        model, parallel: shape of the model, and its split over processes.
        precision: with the choice of the FP8 layers.
        training: recomputation, the seed, and `--deterministic`.
        recipe: defines the linear layers; parameters have its `compute_dtype`.
        vocab_size: of the tokenizer, not padded.
        vp_stage: index of the chunk of an interleaved pipeline stage; None without interleaving.
        sent: counter of the bytes that this rank's tensor-parallel layers send.

    Raises:
        ValueError: if the attention backend is not available, the norm is unknown, or a baseline's library or GPU is missing.
    """
    linears = layer_linears(recipe, precision.bf16_linears or (), smooth=precision.smooth_swiglu)
    if isinstance(recipe, PeerRecipe):
        check_available(recipe)  # before megatron-core's configuration checks the same with another message
    core_config = transformer_config(model, parallel, training, recipe)
    if isinstance(recipe, PeerRecipe):
        layers = peer_block_spec(core_config, vp_stage)
    else:
        options = LayerOptions(
            attention_backend=model.attention_backend,
            saved=saved_activations(precision),
            causal=model.objective == "causal-lm",
            fp8_attention=precision.recipe.gemm if precision.attention_precision == "fp8" else None,
            fused=precision.fuses(model, recipe),
            qk_scope=model.qk_layernorm_scope,
            cp_wire=parallel.cp_wire or "bf16",
        )
        others = dict.fromkeys(precision.layers_in_bf16(model.num_layers), layer_linears(recipe, LINEARS))
        layers = block_spec(core_config, linears, options, vp_stage, others, model.moe_layers)
    head = {"output_linear": output_linear(), "head_precision": precision.output_layer_precision}
    gpt = assemble(model, core_config, layers, vocab_size, vp_stage, seed=training.seed, **head)
    convert_experts(gpt, recipe, precision.fp8_experts(model))
    sent = WireBytes() if sent is None else sent
    connect(gpt, parallel, sent, measure=not training.deterministic)
    count_context(gpt, sent)
    return gpt


def assemble(
    model: ModelConfig,
    core_config: TransformerConfig,
    layers: TransformerBlockSubmodules,
    vocab_size: int,
    vp_stage: int | None = None,
    *,
    seed: int,
    **head: Any,
) -> GPT:
    """`build_model` from megatron-core's configuration and the spec of the transformer block, without `connect`.

    Args:
        layers: spec of the transformer block and its final norm.
        seed: of the initial weights.
        head: `output_linear` and `head_precision` of `GPT`.
        The others: as for `build_model`.
    """
    grid = Grid.current()
    gpt = GPT(
        core_config,
        layers,
        model.padded_vocab_size(vocab_size, core_config.tensor_model_parallel_size),
        model,
        pre_process=grid.is_first_stage(vp_stage),
        post_process=grid.is_last_stage(vp_stage),
        vp_stage=vp_stage,
        **head,
    )
    draw_weights(gpt, model, seed)
    return gpt


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of every token, in nats, computed in FP32.

    Args:
        logits: [s, b, padded vocabulary / tensor-parallel size], any floating dtype; FP32 logits are overwritten.
        labels: [b, s] int64, less than the size of the whole vocabulary.

    Returns:
        [b, s] FP32.
    """
    # In place on one FP32 copy of the logits, the largest tensor of the step; torch's cross entropy keeps three of them.
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()


def mean_loss(loss_sum: Tensor, loss_mask: Tensor, context: Ranks = ALONE) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a micro-batch in the two-value form that megatron-core's schedules require of a loss function.

    The schedule divides the first value by the number of micro-batches and runs backward from it, so that gradients are the mean over
    micro-batches of the mean over counted tokens. Pass `functools.partial(mean_loss, loss_mask=mask)`.

    Args:
        loss_sum: FP32 0-dim, the sum over counted tokens that GPT.forward returns.
        loss_mask: [b, s] FP32, 1 where the token counts, 0 where it does not.
        context: the ranks that have the parts of the same sequences; by default this rank has whole sequences. Each rank divides its own
            sum by the mean count of these ranks, so that the average of their results, and of their gradients, is the mean over the
            sequences.

    Returns:
        The mean, a scalar with gradient (0 if no token counts; if it is non-finite, all gradients are NaN), and for the log
        `{"loss_sum", "tokens"}`: scalars without gradient, whose sums over micro-batches and data-parallel ranks give the exact mean over
        all counted tokens.
    """
    tokens = loss_mask.sum()
    if context.size == 1:
        mean = loss_sum / tokens.clamp(min=1)
    else:
        counted = tokens.clone()
        dist.all_reduce(counted, group=context.group)
        mean = loss_sum * context.size / counted.clamp(min=1)
    # An infinite loss may have finite gradients. Making them NaN lets every rank skip the step; a factor of 1 changes no bit.
    mean = mean * torch.ones_like(mean).masked_fill(~mean.isfinite(), torch.nan)
    return mean, {"loss_sum": loss_sum.detach(), "tokens": tokens.detach()}
