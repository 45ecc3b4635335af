"""GPT: megatron-core's GPTModel built from our configuration, with our layers in it."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megatron.lm.config import Config
from megatron.lm.config.baselines import PeerRecipe
from megatron.lm.config.precision import saved_activations
from megatron.lm.model.attention import check_backend
from megatron.lm.model.initial import draw_weights
from megatron.lm.model.linear import HeadGemm, connect, layer_linears, output_linear
from megatron.lm.model.loss import token_loss
from megatron.lm.model.peer import block_spec as peer_block_spec
from megatron.lm.model.peer import check_available, core_settings, provider
from megatron.lm.model.spec import block_spec
from megatron.lm.processes.grid import Grid
from megatron.lm.processes.process_groups import device, virtual_pipeline_size
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.vocabulary_loss import COMPUTE, linear_cross_entropy
from msamp.parallel.vocabulary import vocabulary_parallel_cross_entropy

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe


class GPT(GPTModel):
    """GPTModel with the class of its output layer as an argument and the loss of `megatron.lm.model.loss`.

    `forward(tokens, position_ids, None)` takes [b, s] int64 and returns logits [b, s, padded vocabulary / tensor-parallel size]; with
    `labels` [b, s] int64 the loss of every token, [b, s] FP32; with `labels` and `loss_mask` [b, s] FP32 the sum of the losses times the
    mask, FP32 0-dim, for which no more than a chunk of the logits is ever held. On a pipeline stage that is not the last it returns
    hidden states [s, b, h].

    Args:
        output_linear: class of the output layer (LM head), constructed as megatron-core's `ColumnParallelLinear`.
        head_precision: of the head's products for a masked loss (`vocabulary_loss.PRECISIONS`); logits that are handed out are never FP8's.
        The others are GPTModel's.
    """

    output_layer: ColumnParallelLinear

    def __init__(
        self,
        *args: Any,
        output_linear: type[ColumnParallelLinear] = ColumnParallelLinear,
        head_precision: str = COMPUTE,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.head_precision = head_precision
        self._angles: dict[int, Tensor] = {}
        if self.pre_process and hasattr(self.embedding, "position_embeddings"):
            # The one layer that megatron-core makes in FP32 whatever params_dtype says, and on the CPU.
            self.embedding.position_embeddings.to(device(), self.config.params_dtype)
        if self.post_process and output_linear is not ColumnParallelLinear:
            weight: Tensor | None = self.output_layer.weight
            self.output_layer = output_linear(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=not self.parallel_output,
                # The weight GPTModel made moves over, marks and all: none is allocated or drawn twice.
                skip_weight_param_allocation=True,
                tp_group=self.pg_collection.tp,
            )
            self.output_layer.weight = weight

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As megatron-core's; the rotary angles of a length [s, 1, 1, r] stay the same tensor for as long as the model is there.

        megatron-core keeps those of the last 32 calls of all models. The tables that graphs read live as long as their angles (`cos_sin`).
        """
        embedded, rotary, *others = super()._preprocess(*args, **kwargs)
        if rotary is not None:
            rotary = self._angles.setdefault(rotary.shape[0], rotary)
        return embedded, rotary, *others

    def hidden_states(self, tokens: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """What the output layer is given.

        Args:
            tokens, position_ids: [b, s] int64.
            attention_mask: bool [b, 1, 1, s], True at the tokens that no other one sees, such as padding; for an encoder alone.

        Returns:
            [s, b, h] behind the final norm, on the last pipeline stage.
        """
        embedded, rotary, *_ = self._preprocess(input_ids=tokens, position_ids=position_ids)
        return self.decoder(hidden_states=embedded, attention_mask=attention_mask, rotary_pos_emb=rotary)

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, labels: Tensor | None = None, loss_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if self.post_process and labels is not None and loss_mask is not None:
            return self._loss_sum(hidden_states, labels, loss_mask)
        return super()._postprocess(hidden_states, *args, labels=labels, loss_mask=loss_mask, **kwargs)

    def _loss_sum(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """hidden_states [s, b, h], with sequence parallelism a share of s, labels and loss_mask [b, s] -> the masked sum, FP32 0-dim."""
        head = self.output_layer
        for hook in head._forward_pre_hooks.values():  # ZeRO's: the weight may still be on its way
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

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [b, s], logits [s, b, vocabulary / TP] -> loss of every token [b, s] FP32."""
        return token_loss(logits, labels)


def transformer_config(config: Config, recipe: "Recipe") -> TransformerConfig:
    """megatron-core's configuration of the model that `config` describes, its parameters in `recipe.compute_dtype`."""
    model, parallel = config.model, config.parallel
    interleaved = virtual_pipeline_size(config) is not None
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
        # megatron-core asks for one of these by name; what is applied is the spec's, GELU in its tanh form.
        activation_func=functional.silu if model.swiglu else functional.gelu,
        # With this flag MLP applies the spec's activation to fc1's biased output, both halves at once.
        use_te_activation_func=True,
        add_bias_linear=not model.disable_bias_linear,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        # `draw_weights` fills them, each by its name.
        init_method=nn.init.zeros_,
        embedding_init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
        recompute_granularity=config.training.recompute_granularity,
        recompute_method=config.training.recompute_method,
        recompute_num_layers=config.training.recompute_num_layers,
        recompute_modules=list(config.training.recompute_modules) or None,
        params_dtype=recipe.compute_dtype,
        fp16=recipe.compute_dtype is torch.float16,
        bf16=recipe.compute_dtype is torch.bfloat16,
        pipeline_dtype=recipe.compute_dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(config),
        sequence_parallel=parallel.sequence_parallel,
        # Interleaved stages over gloo get wrong gradients from batched point-to-point exchange.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        gradient_accumulation_fusion=False,
        deterministic_mode=config.training.deterministic,  # the embedding's backward adds up in order
        # torch.compile for the sake of one addition: it saves well under 1 % of a step on a GPU and wants a C compiler everywhere.
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # the whole layer; the default says so by a word that warns of itself
    )
    return settings(**core_settings(recipe, model))


def build_model(config: Config, recipe: "Recipe", vocab_size: int, vp_stage: int | None = None, sent: WireBytes | None = None) -> GPT:
    """This rank's part of the model, on its device, with parameters in `recipe.compute_dtype`; needs `process_groups.initialize`.

    Weights depend on the seed and the model's shape, not on how it is spread over processes, nor on the recipe beyond
    rounding. The vocabulary is padded (`Config.padded_vocab_size`).

    Args:
        recipe: its linear layers fill the block, `compute_dtype` is the parameters'.
        vocab_size: the tokenizer's, not padded.
        vp_stage: which chunk of an interleaved pipeline stage; None without interleaving.
        sent: where tensor-parallel layers count the bytes that this rank sends.

    Raises:
        ValueError: an attention backend that this machine does not have, an unknown norm, or a peer's recipe without its library or GPU.
    """
    linears = layer_linears(recipe, config.precision.bf16_linears or ()) | {"output_layer": output_linear(recipe)}
    if isinstance(recipe, PeerRecipe):
        check_available(recipe)  # megatron-core's configuration asks for it too, in other words
    core_config = transformer_config(config, recipe)
    layers = peer_block_spec(core_config, provider(), vp_stage) if isinstance(recipe, PeerRecipe) else None
    model = assemble(config, core_config, vocab_size, linears, vp_stage, layers, fused=config.fuses(recipe))
    connect(model, config, WireBytes() if sent is None else sent)
    return model


def assemble(
    config: Config,
    core_config: TransformerConfig,
    vocab_size: int,
    linears: Mapping[str, type],
    vp_stage: int | None = None,
    layers: TransformerBlockSubmodules | None = None,
    *,
    fused: bool = False,
) -> GPT:
    """`build_model` with megatron-core's configuration and the classes of the linear layers by slot given, not connected.

    layers: those of the block and its final norm; None: ours, of `linears`.
    fused: whether ours are fused (`Config.fuses`).
    """
    check_backend(config.model.attention_backend, config.model.attention_dropout)
    model, grid = config.model, Grid.current()
    if layers is None:
        saved, causal = saved_activations(config.precision), model.objective == "causal-lm"
        fp8_attention = config.precision.recipe.gemm if config.precision.attention_precision == "fp8" else None
        layers = block_spec(core_config, linears, vp_stage, model.attention_backend, saved, causal, fp8_attention, fused)
    gpt = GPT(
        config=core_config,
        transformer_layer_spec=layers,
        vocab_size=config.padded_vocab_size(vocab_size),
        max_sequence_length=model.max_positions,
        pre_process=grid.is_first_stage(vp_stage),
        post_process=grid.is_last_stage(vp_stage),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
        output_linear=linears["output_layer"],
        head_precision=config.precision.output_layer_precision,
    )
    draw_weights(gpt, config)
    return gpt
