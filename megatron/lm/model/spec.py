"""The layers of a GPT block as megatron-core's `ModuleSpec`: the class for each slot."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor

from megatron.lm.model.attention import Attention, FP8CoreAttention, SDPAttention
from megatron.lm.model.layer import Layer, activation_of
from megatron.lm.model.moe.layer import moe_class
from megatron.lm.model.norm import head_norm, norm_class
from msamp.nn.saved_activations import AS_IT_IS, Saved
from msamp.nn.unfused import ActivationFunction
from msamp.numerics.recipe import Gemms


class LayerOptions(NamedTuple):
    """What layers have in common besides megatron-core's configuration.

    Attributes:
        attention_backend: `--attention-backend`.
        saved: how the inputs of norms and activations are kept for backward; requires `config.use_te_activation_func`
            (`gpt.transformer_config`).
        causal: whether a token attends to earlier tokens only, or to its whole sequence.
        fp8_attention: the casts of the linear layers, if the core attention is in FP8 too.
        fused: whether the fused blocks of `msamp.nn` compute the layer (`PrecisionConfig.fuses`), which requires `FP8Gemm` linear layers.
        qk_scope: `--qk-layernorm-scope`, for a `config` with `qk_layernorm`.
        cp_wire: `--cp-wire`.
    """

    attention_backend: str = "auto"
    saved: Saved = AS_IT_IS
    causal: bool = True
    fp8_attention: Gemms | None = None
    fused: bool = False
    qk_scope: str = "head"
    cp_wire: str = "bf16"


def layer_spec(config: TransformerConfig, linears: Mapping[str, type], options: LayerOptions, *, experts: bool) -> ModuleSpec:
    """Return the spec of a pre-norm transformer layer: norm, self-attention, residual, norm, MLP with the activation of `config`, residual.

    Args:
        config: megatron-core's configuration; this function reads `normalization` and `qk_layernorm`, the modules read the rest.
        linears: classes of `linear_qkv` and `linear_fc1`, constructed as megatron-core's `ColumnParallelLinear`, and of `linear_proj` and
            `linear_fc2`, constructed as its `RowParallelLinear`.
        experts: whether a mixture of experts replaces the MLP, and the layer is not fused; `linears` and activation then belong to
            its shared expert.
    """
    backend, saved = options.attention_backend, options.saved
    norm = ModuleSpec(module=norm_class(config.normalization), params={"saved": saved})
    together = (config.num_attention_heads, config.num_query_groups) if options.qk_scope == "projection" else (1, 1)
    query_norm, key_norm = (head_norm(config.normalization, n or 1) if config.qk_layernorm else IdentityOp for n in together)
    activation = ModuleSpec(module=Activation, params={"kind": activation_of(config), "saved": saved})
    core = ModuleSpec(module=SDPAttention, params={"backend": backend, "wire": options.cp_wire})
    if options.fp8_attention is not None:
        core = ModuleSpec(module=FP8CoreAttention, params={"backend": backend, "gemm": options.fp8_attention})
    attention = ModuleSpec(
        module=Attention,
        params={"attn_mask_type": AttnMaskType.causal if options.causal else AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears["linear_qkv"],
            core_attention=core,
            linear_proj=linears["linear_proj"],
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )
    parts = MLPSubmodules(linear_fc1=linears["linear_fc1"], activation_func=activation, linear_fc2=linears["linear_fc2"])
    # Classes and not a `ModuleSpec`, whose modules megatron-core passes other arguments in each version.
    mlp = moe_class(parts) if experts else type("MLP", (DenseMLP,), {"parts": parts})
    return ModuleSpec(
        module=Layer,
        params={"saved": saved, "fused": options.fused and not experts},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


class DenseMLP(MLP):
    """megatron-core's MLP of the linear layers and the activation in `parts`, which a subclass defines."""

    parts: MLPSubmodules

    def __init__(self, config: TransformerConfig, **_of_the_layer: Any) -> None:
        super().__init__(config, self.parts, tp_group=get_tensor_model_parallel_group())


class Activation(MegatronModule):
    """The activation [.., n] -> [.., n], or [.., n / 2] for SwiGLU, with its input kept as `saved` says."""

    def __init__(self, config: TransformerConfig, kind: str, saved: Saved) -> None:
        super().__init__(config)
        self.kind, self.saved = kind, saved

    def forward(self, y: Tensor) -> Tensor:
        return ActivationFunction.apply(y, self.kind, self.saved)  # type: ignore[no-any-return]


def block_spec(
    config: TransformerConfig,
    linears: Mapping[str, type],
    options: LayerOptions,
    vp_stage: int | None = None,
    others: Mapping[int, Mapping[str, type]] = MappingProxyType({}),
    experts: Collection[int] = (),
) -> TransformerBlockSubmodules:
    """Return the spec of this rank's (virtual) pipeline stage and the final norm; other arguments as for `layer_spec`.

    Args:
        others: maps the number of a layer in the whole model, counted from 0, to the classes of its linear layers, which replace `linears`.
            Such a layer has no FP8 attention, is not fused and sends BF16.
        experts: numbers of the layers that are mixtures of experts, counted likewise.
    """
    wide = options._replace(fp8_attention=None, fused=False, cp_wire="bf16")
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [layer_spec(config, others.get(n, linears), wide if n in others else options, experts=n in experts) for n in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_class(config.normalization))
