"""The layers of a GPT block as megatron-core's `ModuleSpec`: which class stands in which slot."""

from collections.abc import Mapping

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron.lm.model.attention import SDPAttention
from megatron.lm.model.layer import Layer
from megatron.lm.model.norm import norm_class


def layer_spec(config: TransformerConfig, linears: Mapping[str, type], attention_backend: str = "auto") -> ModuleSpec:
    """One pre-norm transformer layer: norm, causal self-attention, residual, norm, MLP (GELU or SwiGLU, as `config` says), residual.

    Args:
        config: megatron-core's configuration; `normalization` is read here, everything else by the modules.
        linears: classes of `linear_qkv` and `linear_fc1`, constructed as megatron-core's `ColumnParallelLinear`, and of `linear_proj` and
            `linear_fc2`, constructed as its `RowParallelLinear`.
        attention_backend: `--attention-backend`.
    """
    norm = norm_class(config.normalization)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears["linear_qkv"],
            core_attention=ModuleSpec(module=SDPAttention, params={"backend": attention_backend}),
            linear_proj=linears["linear_proj"],
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=linears["linear_fc1"], linear_fc2=linears["linear_fc2"]))
    return ModuleSpec(
        module=Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    config: TransformerConfig, linears: Mapping[str, type], vp_stage: int | None = None, attention_backend: str = "auto"
) -> TransformerBlockSubmodules:
    """The layers of this rank's (virtual) pipeline stage and the final norm; arguments as `layer_spec`."""
    layer = layer_spec(config, linears, attention_backend)
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm_class(config.normalization))
