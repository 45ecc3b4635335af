"""The aten operations that a ScalingTensor knows. Each keeps the payload's precision or says plainly that it leaves it.

An operation enters by one decorated function. Arguments are those of the aten operation, behind the operation itself.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from msamp.numerics.tensor import ScalingTensor

aten = torch.ops.aten
TABLE: dict[Any, Callable[..., Any]] = {}


def _on(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(ops, fn))
        return fn

    return enter


def _like(x: "ScalingTensor", payload: torch.Tensor, scale_inv: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> Any:
    return type(x)(payload, x.scale_inv if scale_inv is None else scale_inv, dtype or x.dtype)


def _is_scaling(x: Any) -> bool:
    return hasattr(x, "payload") and hasattr(x, "scale_inv")


def _changed(x: "ScalingTensor") -> "ScalingTensor":
    # Down here torch does not count versions itself, and a layer tells by the payload's counter that its weight has changed.
    torch.autograd.graph.increment_version(x.payload)
    return x


@_on(aten.detach.default, aten.alias.default)
def _same_payload(func: Any, x: "ScalingTensor") -> Any:
    return _like(x, x.payload)


@_on(
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
def _same_scale(func: Any, x: "ScalingTensor", *args: Any) -> Any:
    return _like(x, func(x.payload, *args))


@_on(aten.clone.default)
def _clone(func: Any, x: "ScalingTensor", *, memory_format: torch.memory_format | None = None) -> Any:
    return _like(x, x.payload.clone(memory_format=memory_format), x.scale_inv.clone())


@_on(aten._to_copy.default)
def _to_copy(func: Any, x: "ScalingTensor", *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """`.to(device)` moves payload and scale; `.to(dtype)` changes only the outer dtype, so the payload stays as small as it is."""
    if dtype is not None and not dtype.is_floating_point:
        raise RuntimeError(f"{func} of a ScalingTensor to {dtype} is not defined; call .dequantize() first")
    memory_format = kwargs.pop("memory_format", None)
    payload = func(x.payload, memory_format=memory_format, **kwargs)
    return _like(x, payload, func(x.scale_inv, **kwargs), dtype)


@_on(aten.copy_.default)
def _copy_(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not _is_scaling(target):
        return target.copy_(source.dequantize(target.dtype), non_blocking)
    if _is_scaling(source) and source.payload.dtype == target.payload.dtype:
        target.payload.copy_(source.payload, non_blocking)
        target.scale_inv.copy_(source.scale_inv, non_blocking)
        return _changed(target)
    target.store_(source.dequantize(torch.float32) if _is_scaling(source) else source.to(target.device, torch.float32))
    return _changed(target)


@_on(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default, aten.rand_like.default)
def _plain_like(func: Any, x: "ScalingTensor", *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """A plain tensor of the outer dtype: what optimizers and buffers made beside a parameter expect."""
    device = kwargs.pop("device", None) or x.device
    kwargs.pop("pin_memory", None)
    return func(torch.empty(x.shape, dtype=dtype or x.dtype, device=device), *args, **kwargs)


@_on(aten.new_zeros.default, aten.new_empty.default)
def _plain_new(func: Any, x: "ScalingTensor", size: Any, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Any:
    return func(x.scale_inv, size, dtype=dtype or x.dtype, device=device or x.device)


@_on(aten.zero_.default)
def _zero_(func: Any, x: "ScalingTensor") -> Any:
    x.payload.zero_()
    x.scale_inv.masked_fill_(~x.scale_inv.isfinite(), 1.0)  # a poisoned gradient that was zeroed is a gradient again
    return _changed(x)


@_on(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _scale_(func: Any, x: "ScalingTensor", factor: Any) -> Any:
    """Multiply by one number: it folds into scale_inv and no element is rounded (how clipping treats FP8 gradients)."""
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise RuntimeError(
            f"{func} of a ScalingTensor takes one number, not a tensor of shape {tuple(factor.shape)}; call .dequantize() first"
        )
    factor = factor.reshape(()) if isinstance(factor, torch.Tensor) else factor
    (x.scale_inv.mul_ if func in (aten.mul_.Tensor, aten.mul_.Scalar) else x.scale_inv.div_)(factor)
    return _changed(x)


@_on(aten.linalg_vector_norm.default)
def _norm(func: Any, x: "ScalingTensor", *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(x.dequantize(torch.float32), *args, **kwargs)


@_on(aten.equal.default)
def _equal(func: Any, x: Any, y: Any) -> bool:
    """Equal payload bits and equal scales: CPU float8 has no comparison of its own."""
    if not (_is_scaling(x) and _is_scaling(y) and x.payload.dtype == y.payload.dtype):
        return False
    same = torch.equal(x.payload.contiguous().view(torch.uint8), y.payload.contiguous().view(torch.uint8))
    return same and torch.equal(x.scale_inv, y.scale_inv)


@_on(aten.is_same_size.default)
def _is_same_size(func: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape
