"""The layers of a peer's recipe: megatron-core's modules around Transformer Engine's, as its own spec provider names them."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn import functional

from megatron.lm.config.baselines import INSTALL, PeerRecipe, installed

if TYPE_CHECKING:
    from megatron.lm.config import ModelConfig


def check_available(recipe: PeerRecipe) -> None:
    """ValueError where Transformer Engine is not installed, cannot be imported, or has no GPU to compute on."""
    if not installed():
        raise ValueError(f"precision {recipe.name} wants Transformer Engine, which is not installed: {INSTALL}, or take --precision bf16")
    if not torch.cuda.is_available():
        raise ValueError(f"precision {recipe.name}: Transformer Engine computes on NVIDIA GPUs, and there is none; take --precision bf16")
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:  # its compiled part, of another torch or CUDA
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"precision {recipe.name}: Transformer Engine is installed and does not load ({why}): {INSTALL}") from error


@functools.cache
def provider() -> BackendSpecProvider:
    """megatron-core's provider of Transformer Engine's modules."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def fusions(model: "ModelConfig") -> dict[str, Any]:
    """What Megatron-LM fuses by default beside Transformer Engine's layers: a peer is to be compared at its best."""
    fused: dict[str, Any] = {"bias_dropout_fusion": True, "apply_rope_fusion": model.position_embedding_type == "rope"}
    fused["use_te_activation_func"] = False  # that of our layers
    if model.swiglu:
        fused |= {"bias_activation_fusion": True, "activation_func": functional.silu}
    elif not model.disable_bias_linear:
        fused |= {"bias_activation_fusion": True, "activation_func": functional.gelu}  # the fused one is the tanh form, as ours
    else:
        fused["activation_func"] = functools.partial(functional.gelu, approximate="tanh")
    return fused


def core_settings(recipe: object, model: "ModelConfig") -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that a peer's recipe sets; none for another recipe."""
    return fusions(model) | dict(recipe.core) if isinstance(recipe, PeerRecipe) else {}


def block_spec(config: TransformerConfig, found: BackendSpecProvider, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this rank's (virtual) pipeline stage and the final norm, of the modules that a provider names.

    As megatron-core's `get_gpt_layer_with_transformer_engine_spec`, with the provider as an argument: norms are fused with the linear
    layers behind them, so that a weight of the first norm is called `self_attention.linear_qkv.layer_norm_weight`.
    """
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=found.column_parallel_layer_norm_linear(),
            core_attention=found.core_attention(),
            linear_proj=found.row_parallel_linear(),
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=get_mlp_module_spec_for_backend(found),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    norm = found.layer_norm(rms_norm=config.normalization == "RMSNorm")
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
