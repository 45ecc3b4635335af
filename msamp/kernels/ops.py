"""The operators: every kernel as a torch operator `torch.ops.msamp.*`, defined by its reference twin.

The twin defines the name and, by its signature, the schema. It is also the fake implementation for torch.compile, unless the kernel's
result has another shape. CPU tensors run the twin. CUDA tensors run the Triton kernel with the same file and function name, or the twin if
there is none or Triton is not installed. They are operators rather than plain functions, so that torch.compile keeps a layer in one graph,
and selective checkpointing, counters and traces see them.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from msamp.kernels import scaled_mm as _scaled_mm
from msamp.kernels.reference import accumulate as _accumulate
from msamp.kernels.reference import activate as _activate
from msamp.kernels.reference import adamw as _adamw
from msamp.kernels.reference import amax as _amax
from msamp.kernels.reference import attention_sink as _attention_sink
from msamp.kernels.reference import block_cast as _block_cast
from msamp.kernels.reference import cast as _cast
from msamp.kernels.reference import cast_transpose as _cast_transpose
from msamp.kernels.reference import coat_adamw as _coat_adamw
from msamp.kernels.reference import collage as _collage
from msamp.kernels.reference import cross_entropy as _cross_entropy
from msamp.kernels.reference import expert_cast as _expert_cast
from msamp.kernels.reference import expert_swiglu as _expert_swiglu
from msamp.kernels.reference import grad_stats as _grad_stats
from msamp.kernels.reference import group_cast as _group_cast
from msamp.kernels.reference import group_tokens as _group_tokens
from msamp.kernels.reference import grouped_mm as _grouped_mm
from msamp.kernels.reference import join_weights as _join_weights
from msamp.kernels.reference import normalize as _normalize
from msamp.kernels.reference import pack as _pack
from msamp.kernels.reference import permute as _permute
from msamp.kernels.reference import rotary as _rotary
from msamp.kernels.reference import scale_from_amax as _scale_from_amax
from msamp.kernels.reference import sums as _sums
from msamp.kernels.reference import tally as _tally
from msamp.kernels.tables import Tables
from msamp.numerics.tensor import PLAIN

Function = TypeVar("Function", bound=Callable[..., Any])
Fake = Callable[..., Any]
Parts = Callable[..., tuple[Any, ...]]

_LIBRARY = torch.library.Library("msamp", "DEF")
_SLOTS, _THREE_SLOTS = ("amax_slot", "scale_inv_slot"), ("amax_slots", "scale_inv_slots")
_CHANNEL_SLOTS = (*_SLOTS, "channel_amax_slot")


@functools.cache
def _implementation(twin: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return the implementation of `twin` on a device type."""
    name, module = twin.__name__, twin.__module__.replace(".reference.", ".triton.")
    if device_type != "cuda" or module == twin.__module__ or importlib.util.find_spec(module) is None:
        return twin
    if importlib.util.find_spec("triton") is None:
        warnings.warn(f"Triton is not installed; {name} runs slower, in plain torch operations: pip install triton", stacklevel=2)
        return twin
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _on_cuda(twin: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor | list[torch.Tensor], *args: object, **flags: object) -> Any:
        device = x[0].device if isinstance(x, list) else x.device
        if device.index == torch._C._cuda_getDevice():  # the tensor is there, so CUDA is initialized
            return _implementation(twin, "cuda")(x, *args, **flags)
        with torch.cuda.device(device):  # Triton launches on the current device, not on the device of its arguments
            return _implementation(twin, "cuda")(x, *args, **flags)

    return run


def _unseen(x: object) -> bool:
    """Whether only the kernel sees an operator on `x`: a plain tensor in memory, without autograd, trace or dispatch mode."""
    return (
        type(x) in PLAIN
        and (x.is_cuda or x.is_cpu)  # type: ignore[attr-defined]
        and not torch.is_grad_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and not (torch._C._is_tracing() or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch))
    )


def _operator(twin: Function, mutates: tuple[str, ...] = (), fake: Fake | None = None, parts: Parts | None = None) -> Function:
    """Return the operator that `twin` defines, as a function. If only the kernel would see a call, the function skips torch's
    dispatcher, which took 25 of an operator's 93 us of host time (H200). An operator that changes more than its slots in place is always
    dispatched, since autograd must see the change.

    Args:
        twin: the definition, with the operator's name and the signature from which its schema follows.
        mutates: arguments that are changed in place.
        fake: the implementation for fake tensors; by default the twin.
        parts: in place of `fake`, if the last result is column sums: the operator's arguments -> those of the kernel's `parts`.
    """
    name = twin.__name__
    _LIBRARY.define(name + torch.library.infer_schema(twin, mutates_args=mutates))
    on_cuda = _on_cuda(twin)

    def on_cpu(*args: Any, **flags: Any) -> Any:
        with torch._C._DisableAutocast():  # whose dtype its products would have: in FP16 sums of codes overflow
            return twin(*args, **flags)

    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"msamp::{name}", fake or (_fake_sums(twin, parts) if parts else twin), lib=_LIBRARY)
    operator = getattr(torch.ops.msamp, name).default

    if not set(mutates) <= {*_CHANNEL_SLOTS, *_THREE_SLOTS}:
        return operator  # type: ignore[no-any-return]

    def call(x: Any, *args: Any, **flags: Any) -> Any:
        first = x[0] if type(x) is list and x else x
        if not torch.compiler.is_compiling() and _unseen(first):
            return (on_cuda if first.is_cuda else on_cpu)(x, *args, **flags)
        return operator(x, *args, **flags)

    return call  # type: ignore[return-value]


def _over_many(twin: Function, check: Callable[..., None] | None = None) -> Function:
    """Return the function over many tensors that `twin` defines, on the device of its `Tables`.

    It is not an operator: its lists change from step to step, and optimizers are not compiled by torch.compile.

    Args:
        twin: the definition.
        check: raises a ValueError for arguments that do not fit, before any memory is touched; a `Batch` checks its own tensors.
    """

    def run(tables: Tables, *args: Any, **flags: Any) -> Any:
        device = tables.device
        if check is not None:
            check(*args, **flags)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return _implementation(twin, device.type)(tables, *args, **flags)

    return run  # type: ignore[return-value]


def _in_parts(sums: torch.Tensor, twin: Callable[..., Any], *of: Any) -> torch.Tensor:
    """Return fake column sums with one row per part that the kernel returns; the twin returns one row, or none if not requested."""
    run = _implementation(twin, sums.device.type)
    if run is twin or sums.ndim < 2:
        return sums
    return sums.new_empty((importlib.import_module(run.__module__).parts(*of), sums.shape[1]))


def _fake_sums(twin: Callable[..., Any], parts: Parts) -> Fake:
    """Return the fake of an operator whose last result is column sums."""

    def fake(*args: Any, **flags: Any) -> tuple[torch.Tensor, ...]:
        *others, sums = twin(*args, **flags)
        return *others, _in_parts(sums, twin, *parts(*args))

    return fake


def _fake_normalize_backward(grad_y: torch.Tensor, x: torch.Tensor, *args: Any, **flags: Any) -> tuple[torch.Tensor, ...]:
    twin = _normalize.normalize_backward
    grad_x, *sums = twin(grad_y, x, *args, **flags)
    return grad_x, *(_in_parts(vector, twin, *x.shape, x.device) for vector in sums)


def _fake_scaled_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **flags: Any) -> torch.Tensor:
    # Not the twin: its cached tables of values would be fake tensors from then on.
    return a.new_empty((a.shape[0], b.shape[0]), dtype=args[3])


accumulate = _operator(_accumulate.accumulate, mutates=("payload", "scale_inv", "draw"), fake=lambda *_: None)
add_payload_ = _operator(_accumulate.add_payload_, mutates=("g",))
activate = _operator(_activate.activate, mutates=_CHANNEL_SLOTS)
activate_backward = _operator(_activate.activate_backward, mutates=_SLOTS, parts=lambda grad_a, y, kind, *_: (y.shape[0], kind))
amax = _operator(_amax.amax)
attention_sink = _operator(_attention_sink.attention_sink)
block_cast = _operator(_block_cast.block_cast, mutates=("amax_slot",))
block_scaled_mm = _operator(_scaled_mm.block_scaled_mm, fake=_fake_scaled_mm)
cast = _operator(_cast.cast)
cast_columns = _operator(_cast_transpose.cast_columns)
cast_transpose = _operator(_cast_transpose.cast_transpose, mutates=_SLOTS, parts=lambda x, *_: (x.shape[0],))
cast_transposed = _operator(_cast_transpose.cast_transposed)
cross_entropy_ = _operator(_cross_entropy.cross_entropy_, mutates=("logits",))
cross_entropy_of_parts_ = _operator(_cross_entropy.cross_entropy_of_parts_, mutates=("logits",))
expert_cast = _operator(_expert_cast.expert_cast)
expert_swiglu = _operator(_expert_swiglu.expert_swiglu, mutates=("amax_slot",))
expert_swiglu_backward = _operator(
    _expert_swiglu.expert_swiglu_backward, mutates=("amax_slot",), parts=lambda grad_a, *_: (grad_a.shape[1],)
)
group_cast = _operator(_group_cast.group_cast)
group_decode = _operator(_group_cast.group_decode)
group_tokens = _operator(_group_tokens.group_tokens)
grouped_mm = _operator(_grouped_mm.grouped_mm, fake=lambda a, b, offsets, *args, **_: a.new_empty((a.shape[0], b.shape[1]), dtype=args[2]))
grouped_mm_grad_weight = _operator(
    _grouped_mm.grouped_mm_grad_weight,
    fake=lambda a_t, b_t, offsets, *args, **_: a_t.new_empty((offsets.shape[0], a_t.shape[0], b_t.shape[0]), dtype=args[2]),
)
grouped_tiles = _operator(
    _grouped_mm.grouped_tiles,
    fake=lambda offsets, rows, block: offsets.new_empty((4, _grouped_mm.tile_capacity(rows, offsets.shape[0], block))),
)
join_weights = _operator(_join_weights.join_weights)
normalize = _operator(_normalize.normalize, mutates=_SLOTS)
normalize_backward = _operator(_normalize.normalize_backward, fake=_fake_normalize_backward)
normalize_transposed = _operator(_normalize.normalize_transposed)
permute = _operator(_permute.permute)
rotary_ = _operator(_rotary.rotary_, mutates=("qkv",))
rotary_cast = _operator(_rotary.rotary_cast, mutates=_THREE_SLOTS)
rotary_backward = _operator(_rotary.rotary_backward, mutates=_SLOTS, parts=lambda dq, dk, dv, cos, *_: (len(cos) * dq.shape[1],))
scale_from_amax = _operator(_scale_from_amax.scale_from_amax)
scaled_mm = _operator(_scaled_mm.scaled_mm, fake=_fake_scaled_mm)
scaled_mm_ = _operator(_scaled_mm.scaled_mm_, mutates=("out",))
sink_backward = _operator(_attention_sink.sink_backward, mutates=_SLOTS, parts=lambda grad_o, *_: (len(grad_o),))
sink_center_ = _operator(_attention_sink.sink_center_, mutates=("sink",))
sink_merge = _operator(_attention_sink.sink_merge, mutates=_SLOTS)
softmax_parts = _operator(_cross_entropy.softmax_parts)
sum_parts = _operator(_sums.sum_parts)
sum_payloads = _operator(_sums.sum_payloads)
count_ = _operator(_tally.count_, mutates=("row",))
tally_ = _operator(_tally.tally_, mutates=("row",))
tally_update_ = _operator(_tally.tally_update_, mutates=("row",))
transpose = _operator(_cast_transpose.transpose)
unpermute = _operator(_permute.unpermute)
weight_scales = _operator(_scale_from_amax.weight_scales)

adamw = _over_many(_adamw.adamw)
coat_adamw = _over_many(_coat_adamw.coat_adamw)
collage = _over_many(_collage.collage)
grad_stats = _over_many(_grad_stats.grad_stats, _grad_stats.check_devices)
pack = _over_many(_pack.pack, _pack.check_pieces)
