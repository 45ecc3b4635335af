"""The aten operations that a ScalingTensor supports. Each keeps the payload's precision, unless its docstring says that it does not.

To add an operation, write one decorated function. It takes the aten operation itself, then that operation's arguments.

Arithmetic is for code that works on weights directly: averages, merged adapters, initialization, modules that read another module's weight.
It returns a plain tensor of the outer dtype. In place, it computes in FP32, rounds to nearest and stores the result with a new scale, and
warns if rounding loses the change (`msamp.numerics.lost_writes`). Elementwise operations and those of `torch._foreach_*` count as
arithmetic by their schema (`by_schema`). Views of a part (slices, `split`) are undefined, since a write to one would need its own scale.
Concatenating weights, with which wrappers flatten a model, is undefined too; gradients can be concatenated.
"""

import contextlib
import contextvars
import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from msamp.numerics.lost_writes import LOADING, warn_if_copy_lost, warn_if_lost, warn_of_rounding

if TYPE_CHECKING:
    from msamp.numerics.tensor import ScalingTensor

aten = torch.ops.aten
TABLE: dict[Any, Callable[..., Any]] = {}
KEEPING: contextvars.ContextVar[bool] = contextvars.ContextVar("keeping", default=False)
_WATCHES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # payload -> a weak reference to its observer


def _on(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(ops, fn))
        return fn

    return enter


def _overloads(*names: str) -> Iterator[Any]:
    """Yield the overloads that torch calls: without those that write to `out` or take only Python numbers."""
    for name in names:
        packet = getattr(aten, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            arguments = overload._schema.arguments
            if arguments and "Tensor" in str(arguments[0].type) and not any(argument.is_out for argument in arguments):
                yield overload


def _like(x: "ScalingTensor", payload: torch.Tensor, scale_inv: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> Any:
    like = type(x)(payload, x.scale_inv if scale_inv is None else scale_inv, dtype or x.dtype)
    if x.label:
        like.label = x.label
    return like


@contextlib.contextmanager
def keeping_format() -> Iterator[None]:
    """Context in which a conversion to another dtype, such as that of `model.bfloat16()`, leaves payloads as they are."""
    token = KEEPING.set(True)
    try:
        yield
    finally:
        KEEPING.reset(token)


def _is_scaling(x: Any) -> bool:
    return hasattr(x, "payload") and hasattr(x, "scale_inv")


_CUT = (
    "DistributedDataParallel, FullyShardedDataParallel, fully_shard and DTensor flatten or split weights this way and do not support this "
    "one: use the model of msamp.initialize without a wrapper, since its optimizer averages the gradients (zero=True shards it over the "
    "processes), or call msamp.integrations.fsdp.prepare(model) before fully_shard"
)
_ADVICE = {  # by operation; those of c10d exist only in a torch with torch.distributed
    "aten.cat.default": _CUT,
    "aten.split.Tensor": _CUT,
    "aten.slice.Tensor": "If torch.distributed.checkpoint loads it, FSDP2 saved it in rows: load it into the model before "
    "msamp.initialize, or after msamp.integrations.fsdp.prepare and fully_shard",
    "c10d.broadcast_.default": "If torch.distributed.checkpoint's broadcast_from_rank0 sends it: pass the whole state on every rank, "
    "without that option",
}


def undefined(func: Any, arguments: Any) -> RuntimeError:
    """Return the error for an operation that is undefined for a ScalingTensor. It is not a TypeError, which Python would turn into
    "unsupported operand" without the name."""
    label = next((x.label for x in tree_leaves(arguments) if _is_scaling(x) and x.label), "")
    layer = label.rpartition(".")[0]
    asked = f"{func} is not defined for a ScalingTensor; call .dequantize() first, or work on its payload and scale_inv"
    if str(func) in _ADVICE:
        asked += f". {_ADVICE[str(func)]}"
    if not label:
        return RuntimeError(asked)
    return RuntimeError(
        f"{asked}. It is {label} of the model; to keep that layer as it is: "
        f"msamp.initialize(..., accept=msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r'^{re.escape(layer)}$')))"
    )


class WeightWatch(Protocol):
    """An observer of writes to a weight through these operations, which are not the writes of this library's optimizers."""

    def weight_was_written(self) -> None:
        """Called after each write."""


def watch(weight: "ScalingTensor", watcher: WeightWatch) -> None:
    """Notify `watcher`, held weakly, after every operation that writes to the memory of `weight`."""
    _WATCHES[weight.payload] = weakref.ref(watcher)


def _changed(x: "ScalingTensor") -> "ScalingTensor":
    # Torch does not count versions below autograd, and layers detect changed weights by the payload's version.
    torch.autograd.graph.increment_version(x.payload)
    watcher = _WATCHES.get(x.payload, lambda: None)()
    if watcher is not None and not LOADING.get():  # the scales are loaded too, or reset, and may be those in the state
        watcher.weight_was_written()
    return x


@_on(aten.detach.default, aten.alias.default)
def _same_payload(func: Any, x: "ScalingTensor") -> Any:
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() and not x.is_inference() else contextlib.nullcontext():
        return _like(x, x.payload)  # torch gives it the version counter of x, which a tensor of inference mode cannot have


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
    """`.to(device)` moves payload and scale. Another dtype is a conversion to plain values, but when a model changes its dtype: then only
    the outer dtype changes, and the payload stays."""
    if dtype is not None and dtype != x.dtype and not KEEPING.get():
        return func(x.dequantize(dtype if dtype.is_floating_point else x.dtype), dtype=dtype, **kwargs)
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
    if _is_scaling(source):
        target.store_(source.dequantize(torch.float32))
        return _changed(target)
    before = target.dequantize(torch.float32)
    target.store_(source.to(target.device, torch.float32).expand(target.shape))
    warn_if_copy_lost(str(func), target.format, before, source.expand(target.shape), target.dequantize(torch.float32))
    return _changed(target)


@_on(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default, aten.rand_like.default)
def _plain_like(func: Any, x: "ScalingTensor", *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Return a plain tensor of the outer dtype, as optimizers expect of a state or buffer; one of the format for `model.to_empty`."""
    device = kwargs.pop("device", None) or x.device
    kwargs.pop("pin_memory", None)
    if func is aten.empty_like.default and KEEPING.get():
        return _like(x, func(x.payload, device=device), func(x.scale_inv, device=device))
    return func(torch.empty(x.shape, dtype=dtype or x.dtype, device=device), *args, **kwargs)


_on(aten.is_pinned.default)(lambda func, x, *args: func(x.payload, *args))


@_on(aten.new_zeros.default, aten.new_empty.default)
def _plain_new(func: Any, x: "ScalingTensor", size: Any, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Any:
    """Return a plain tensor of the outer dtype; of the same format for a buffer of the same shape on a device, to which
    torch.distributed.checkpoint copies payload and scale before an asynchronous save."""
    if func is aten.new_empty.default and device is not None and dtype is None and tuple(size) == tuple(x.shape):
        return _like(x, func(x.payload, size, device=device), func(x.scale_inv, (), device=device))
    return func(x.scale_inv, size, dtype=dtype or x.dtype, device=device or x.device)


@_on(aten.zero_.default)
def _zero_(func: Any, x: "ScalingTensor") -> Any:
    x.payload.zero_()
    x.scale_inv.masked_fill_(~x.scale_inv.isfinite(), 1.0)  # a poisoned gradient becomes valid again once it is zeroed
    return _changed(x)


def _plain(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert an argument for plain arithmetic: a ScalingTensor becomes its values, in `dtype` or, if None, its outer dtype."""
    if isinstance(value, list | tuple):
        return [_plain(item, dtype) for item in value]
    if _is_scaling(value):
        return value.dequantize(dtype)
    return value.to(dtype) if dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point() else value


# Outside inference mode, `linear` and `matmul` decompose into `addmm`, `mm` and similar operations.
@_on(
    *_overloads("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "sqrt", "lerp", "addcmul", "addcdiv", "sum", "mean", "eq", "ne"),
    *_overloads(
        "linear", "matmul", "mm", "addmm", "bmm", "mv", "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div", "_foreach_lerp"
    ),
)
def _computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Arithmetic on the values, in the outer dtype; the result is plain."""
    return func(*_plain(args, None), **{name: _plain(value, None) for name, value in kwargs.items()})


# Operations that read values and are not elementwise. Results are in new memory: a write to a view of a part would be lost.
_READING = (
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all", "prod", "var", "std", "var_mean", "std_mean", "median"),
    *("nanmedian", "nansum", "mode", "kthvalue", "topk", "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logsumexp"),
    *("count_nonzero", "nonzero", "histc", "dot", "vdot", "outer", "allclose", "isin", "tril", "triu", "trace", "flip", "roll", "norm"),
    *("index", "index_select", "masked_select", "gather", "take", "item", "_local_scalar_dense", "_linalg_svd", "_linalg_eigh"),
    *("linalg_qr", "linalg_cholesky_ex", "linalg_inv_ex", "cdist", "_unique2", "is_nonzero", "masked_fill", "index_put", "where"),
)
_on(*_overloads(*_READING))(_computed)


@_on(aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: Any, *args: Any) -> Any:
    """Concatenate gradients and other tensors that are not weights of a model, as plain values."""
    if any(getattr(x, "label", "") for x in tensors):
        raise undefined(func, tensors)
    return _computed(func, tensors, *args)


@_on(*_overloads("_foreach_norm"), aten.linalg_vector_norm.default)
def _norm(func: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    return func(tree_map(lambda x: x.dequantize(torch.float32) if _is_scaling(x) else x, xs), *args, **kwargs)


_AVERAGING, _SCALING = ("add_", "sub_", "lerp_", "addcmul_", "addcdiv_"), ("mul_", "div_")
_FILLING = ("neg_", "clamp_", "erfinv_", "fill_", "normal_", "uniform_", "masked_fill_", "index_put_", "tril_", "triu_")


@_on(*_overloads(*_AVERAGING, *_SCALING, *_FILLING, *(f"_foreach_{name}" for name in (*_AVERAGING, *_SCALING))))
def _stored(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Run in-place arithmetic in FP32 and store the result in the target's format with a new scale. A plain target gets the values."""
    several = isinstance(target, list | tuple)
    targets = list(target) if several else [target]
    values = [x.dequantize(torch.float32) if _is_scaling(x) else x for x in targets]

    def beside(argument: Any) -> Any:
        if several and isinstance(argument, list | tuple):
            return [_plain(item, value.dtype) for item, value in zip(argument, values, strict=True)]
        return _plain(argument, values[0].dtype if values and not several else None)

    others = {name: beside(value) for name, value in kwargs.items()}
    func(values if several else values[0], *(beside(argument) for argument in args), **others)
    for x, value in zip(targets, values, strict=True):
        if _is_scaling(x):
            # `mul_` by a number may just have been folded into the scale, as in k.mul_(m).add_(q, alpha=1 - m): compare with the value
            # before that.
            before = x.payload.float() * torch.exp2(torch.log2(x.scale_inv).round())
            x.store_(value)
            if func._opname.removeprefix("_foreach_") in _AVERAGING:
                if x.payload.itemsize == 1:
                    warn_of_rounding(str(func), x.format)
                else:
                    warn_if_lost(str(func), x.format, before, value, x.dequantize(torch.float32))
            _changed(x)
    return None if several else target


@_on(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _scale_(func: Any, x: Any, factor: Any) -> Any:
    """Multiply by one number, by changing scale_inv: no element is rounded. Clipping does this to FP8 gradients."""
    if not _is_scaling(x) or _is_scaling(factor) or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        return _stored(func, x, factor)
    factor = factor.reshape(()) if isinstance(factor, torch.Tensor) else factor
    (x.scale_inv.mul_ if func in (aten.mul_.Tensor, aten.mul_.Scalar) else x.scale_inv.div_)(factor)
    return _changed(x)


@_on(
    aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar, aten._foreach_zero_.default
)
def _each_(func: Any, xs: Any, *factor: Any) -> None:
    """Apply `_scale_` or `_zero_` to each."""
    for x in xs:
        getattr(x, func._opname.removeprefix("_foreach_"))(*factor)


@_on(aten._foreach_copy_.default)
def _copy_all_(func: Any, targets: Any, sources: Any, non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


@_on(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_(func: Any, gradients: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for torch's GradScaler, by changing scale_inv: no element is rounded."""
    plain = [x for x in gradients if not _is_scaling(x)]
    if plain:
        func(plain, found_inf, inv_scale)
    for x in gradients:
        if _is_scaling(x):
            found_inf.copy_(torch.maximum(found_inf, (~x.dequantize(torch.float32).isfinite().all()).to(found_inf)))
            x.scale_inv.mul_(inv_scale.reshape(()))
            _changed(x)


def by_schema(func: Any) -> Callable[..., Any] | None:
    """Return the function that runs an operation missing from the table, if the schema is enough to tell: elementwise operations and
    `torch._foreach_*`. Return None for any other, for views, and for those that write to an `out`."""
    if torch.Tag.pointwise not in func.tags and not func._opname.startswith("_foreach_"):
        return None
    if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in func._schema.returns):
        return None
    arguments = func._schema.arguments
    written = [argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    if not written:
        return _computed
    return _stored if len(written) == 1 and written[0].name == arguments[0].name == "self" else None


@_on(aten.equal.default)
def _equal(func: Any, x: Any, y: Any) -> bool:
    """Compare payload bits and scales: torch has no float8 comparison on the CPU."""
    if not (_is_scaling(x) and _is_scaling(y) and x.payload.dtype == y.payload.dtype):
        return False
    same = torch.equal(x.payload.contiguous().view(torch.uint8), y.payload.contiguous().view(torch.uint8))
    return same and torch.equal(x.scale_inv, y.scale_inv)


_on(aten.is_same_size.default)(lambda func, x, y: x.shape == y.shape)
