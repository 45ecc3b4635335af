"""The layers of a baseline's recipe: megatron-core's modules with Transformer Engine's layers, from its own specs."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
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


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of this rank's (virtual) pipeline stage and the final norm, with megatron-core's modules of Transformer Engine.

    Norms are fused with the linear layers after them, so the weight of the first norm is named
    `self_attention.linear_qkv.layer_norm_weight`.
    """
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    norm = gpt_layer_specs.TESpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=norm)
