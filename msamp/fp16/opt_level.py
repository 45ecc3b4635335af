"""Apex's levels O0 to O3 as data, and the conversion of a model to a level.

They are not the FP8 levels of `msamp.initialize`, which FP8-LM gives the same names.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from msamp.numerics.formats import FP16
from msamp.numerics.tensor import ScalingTensor

Keep = Callable[[nn.Module], bool]
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class OptLevel:
    """The settings of a level.

    Attributes:
        name: as the user writes it.
        loss_scale: the default, "dynamic" or a constant.
        autocast: run GEMM-like operations in FP16 and reductions in FP32, with unchanged weights.
        fp16_weights: convert the model to FP16; it casts its inputs to FP16 and its outputs back to FP32.
        fp32_norms: keep norms in FP32, both weights and arithmetic.
        master_weights: the optimizer updates FP32 copies of the FP16 weights.
    """

    name: str
    loss_scale: float | str
    autocast: bool = False
    fp16_weights: bool = False
    fp32_norms: bool = False
    master_weights: bool = False


LEVELS: Mapping[str, OptLevel] = {
    "O0": OptLevel("O0", loss_scale=1.0),
    "O1": OptLevel("O1", loss_scale="dynamic", autocast=True),
    "O2": OptLevel("O2", loss_scale="dynamic", fp16_weights=True, fp32_norms=True, master_weights=True),
    "O3": OptLevel("O3", loss_scale=1.0, fp16_weights=True),
}


def by_name(name: str) -> OptLevel:
    """Return the level of that name; ValueError if it is unknown."""
    if name not in LEVELS:
        raise ValueError(f"opt_level is {name!r}; choose one of {', '.join(LEVELS)} (FP8 levels are those of msamp.initialize)")
    return LEVELS[name]


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is one of torch's norms, or a leaf module whose class name ends in Norm."""
    return isinstance(module, _NORMS) or (type(module).__name__.endswith("Norm") and not list(module.children()))


def check_model(model: nn.Module, level: OptLevel) -> None:
    """Raise a ValueError for a model that cannot be converted to the level."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"the model is a {type(model).__name__}, whose buckets already depend on the dtypes; initialize first, then wrap it"
        )
    check_first(model)
    if not list(model.parameters()):
        raise ValueError("the model has no parameters, which determine the device; leave it out, or initialize the model that contains it")
    for name, p in model.named_parameters():
        if isinstance(p, ScalingTensor):
            raise ValueError(f"{name} is a ScalingTensor; FP8 models do not use amp: call only msamp.initialize")
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ValueError(f"{name} is {p.dtype}; amp requires torch.float32: call model.float() first")
        if level.fp16_weights and p.grad is not None:
            raise ValueError(f"{name} has a gradient, which would be lost; initialize before the first backward")
        if level.fp16_weights and p.is_floating_point() and p.numel() and not p.detach().abs().amax() <= FP16.max:
            raise ValueError(f"{name} has values outside +-{FP16.max:.0f}, the range of FP16; train it at O1, or in BF16")


def check_first(model: nn.Module) -> None:
    """Raise a ValueError for what is not a module, or already computes in FP16 at one of these levels."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; pass a torch.nn.Module (several: one nn.ModuleList)")
    if any(isinstance(m.forward, functools.partial) and m.forward.func in (_autocast, _between) for m in model.modules()):
        raise ValueError("the model was already passed to msamp.amp.initialize; call it once, with all optimizers, and no other")


def prepare_model(model: nn.Module, level: OptLevel, keep_fp32: Keep = is_norm) -> dict[torch.Tensor, torch.Tensor]:
    """Convert `model` to `level` in place; its parameters remain the same objects.

    Args:
        keep_fp32: module -> bool, whether it stays FP32 at a level with `fp32_norms`.

    Returns:
        The former FP32 values of each parameter that is now FP16.
    """
    full: dict[torch.Tensor, torch.Tensor] = {}
    if level.fp16_weights:
        for module in model.modules():
            if level.fp32_norms and keep_fp32(module):
                module.forward = functools.partial(_between, module.forward, torch.float32, torch.float16)
            else:
                full |= _halve(module)
        model.forward = functools.partial(_between, model.forward, torch.float16, torch.float32)
    elif level.autocast:
        model.forward = functools.partial(_autocast, model, model.forward)
    return full


def _halve(module: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Cast the tensors of `module` itself to FP16, but no rotary frequencies; return the former values of its parameters."""
    new = (p for p in module.parameters(recurse=False) if p.dtype == torch.float32)  # a tied weight is FP16 the second time
    full: dict[torch.Tensor, torch.Tensor] = {p: p.data for p in new}
    for p, values in full.items():
        p.data = values.half()
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and not name.endswith("inv_freq"):  # transformers': angles 2 radians off at token 8,000
            setattr(module, name, buffer.half())
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()
    return full


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dicts to `dtype`."""
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


# Partials of bound methods, not closures: a deep copy of the module then binds them to the copy.


def _between(forward: Callable[..., Any], inside: torch.dtype, outside: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), inside)
    return _cast(forward(*args, **kwargs), outside)


def _autocast(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(next(model.parameters()).device.type, torch.float16):
        outputs = forward(*args, **kwargs)
    return _cast(outputs, torch.float32)
