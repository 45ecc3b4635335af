"""The layers of a baseline's recipe: megatron-core's modules with Transformer Engine's layers, from its own spec provider."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.activations import squared_relu
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

from megatron.lm.config.sections.baselines import INSTALL, PeerRecipe, installed

if TYPE_CHECKING:
    from megatron.lm.config import ModelConfig


def check_available(recipe: PeerRecipe) -> None:
    """Raise a ValueError if Transformer Engine is not installed, cannot be imported, or has no GPU."""
    if not installed():
        raise ValueError(f"precision {recipe.name} requires Transformer Engine, which is not installed: {INSTALL}, or use --precision bf16")
    if not torch.cuda.is_available():
        raise ValueError(
            f"precision {recipe.name}: Transformer Engine requires an NVIDIA GPU, and this machine has none; use --precision bf16"
        )
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:  # its extension was built for another torch or CUDA
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"precision {recipe.name}: Transformer Engine is installed but cannot be imported ({why}): {INSTALL}") from error


@functools.cache
def provider() -> BackendSpecProvider:
    """Return megatron-core's provider of Transformer Engine's modules."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def fusions(model: "ModelConfig") -> dict[str, Any]:
    """Return the fusions that Megatron-LM enables by default with Transformer Engine, so that a baseline is compared at its best."""
    fused: dict[str, Any] = {"bias_dropout_fusion": True, "apply_rope_fusion": model.position_embedding_type == "rope"}
    fused["use_te_activation_func"] = False  # used by our layers only
    if model.swiglu:
        fused |= {"bias_activation_fusion": True, "activation_func": functional.silu}
    elif model.squared_relu:
        fused["activation_func"] = squared_relu
    elif not model.disable_bias_linear:
        fused |= {"bias_activation_fusion": True, "activation_func": functional.gelu}  # the fused kernel uses the tanh form, like ours
    else:
        fused["activation_func"] = functools.partial(functional.gelu, approximate="tanh")
    return fused


def core_settings(recipe: object, model: "ModelConfig") -> dict[str, Any]:
    """Return the fields of megatron-core's TransformerConfig that a baseline's recipe sets; empty for other recipes."""
    return fusions(model) | dict(recipe.core) if isinstance(recipe, PeerRecipe) else {}


def block_spec(config: TransformerConfig, backend: BackendSpecProvider, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of this rank's (virtual) pipeline stage and the final norm, with the provider's modules.

    Like megatron-core's `get_gpt_layer_with_transformer_engine_spec`, but with the provider as an argument. Norms are fused with the linear
    layers after them, so the weight of the first norm is named `self_attention.linear_qkv.layer_norm_weight`.
    """
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
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
            mlp=get_mlp_module_spec_for_backend(backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
