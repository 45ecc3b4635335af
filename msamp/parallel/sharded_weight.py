"""The weight of an FP8 layer that torch's `fully_shard` cuts by rows and gathers at one byte per element.

A tensor subclass can define what FSDP2 gathers: `fsdp_pre_all_gather` returns the bytes that this rank sends, and `fsdp_post_all_gather`
turns all ranks' bytes into the parameter with which the layer computes. Between steps a `ShardedWeight` is a ScalingTensor in FP16 with one
scale for all ranks. It sends the FP8 codes that the GEMM would use on one process, so the ranks must know the amax of the whole weight
before they cast their rows.

`GatheredCodes.take` casts the rows of all weights once per step, in one launch, and stores their scales in memory that never moves. So a
gather only passes on bytes that are ready: FSDP2 gathers every weight twice per step, and a cast, a copy of the scale and an inspection of
the hook's signature per weight and gather kept the host busy longer than the GPU. The codes take one byte per element of this rank's rows.
A weight that something else wrote since, such as a loaded one, measures and casts itself when it is gathered next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import ops
from msamp.kernels.scalar_pool import aligned
from msamp.kernels.tables import Tables
from msamp.nn.cast_scales import scales_of_weights
from msamp.nn.linear import FP8Linear
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Cast
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.grad_cast import ALIGNMENT

aten = torch.ops.aten


@dataclass(eq=False)
class Sent:
    """What a weight sends, valid for one version of its payload. A deep copy is None: a copied weight casts itself.

    Attributes:
        version: of the payload.
        codes: uint8, this rank's rows in FP8, padded with zeros to the rows per rank.
        scale_inv: FP32 0-dim, of the gathered weight, always in the same memory.
    """

    version: int
    codes: torch.Tensor
    scale_inv: torch.Tensor

    def __deepcopy__(self, memo: Any) -> None:
        return None


class _PreAllGather:
    """The attribute `fsdp_pre_all_gather` of a weight.

    torch inspects the signature of this hook before every call. For a method that takes longer than the rest of a gather, so this returns
    a callable that states its signature.
    """

    def __get__(self, weight: ShardedWeight, owner: type[ShardedWeight]) -> _BoundPreAllGather:
        return _BoundPreAllGather(weight)


class _BoundPreAllGather:
    __slots__ = ("_weight",)
    __signature__: inspect.Signature

    def __init__(self, weight: ShardedWeight) -> None:
        self._weight = weight

    def __call__(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any) -> Any:
        """torch's extension point: return this rank's rows as FP8 bytes, padded to the rows per rank, and scale_inv and dtype."""
        assert isinstance(module, FP8Linear)
        cast, weight = module.scaling.gemm.weight, self._weight
        rows = -(-outer_size[0] // mesh.size())
        if weight.payload.dtype == cast.format.dtype:
            codes = weight.payload.view(torch.uint8)
            padded = codes if len(codes) == rows else torch.cat([codes, codes.new_zeros(rows - len(codes), *codes.shape[1:])])
            return (padded,), (weight.scale_inv, cast.format.dtype)
        sent = weight.sent
        if sent is None:
            sent = weight.measure(cast, rows, Peers(mesh.get_group(), WireBytes()))
        return (sent.codes,), (sent.scale_inv, cast.format.dtype)


_BoundPreAllGather.__signature__ = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
    ]
)


class ShardedWeight(ScalingTensor):
    """The weight of an FP8Linear that `fully_shard` can shard along dim 0: a ScalingTensor, whose rows are ScalingTensors with its scale.

    Only the optimizer, or a copy from another ScalingTensor, can write it. Writing plain values raises, since each rank would quantize its
    rows with its own scale.
    """

    _sent: Sent | None = None
    fsdp_pre_all_gather = _PreAllGather()

    @property
    def sent(self) -> Sent | None:
        """What this weight sends; None if it was written since its codes were cast."""
        sent = self._sent
        return sent if sent is not None and sent.version == self.payload._version else None

    def send(self, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Send these codes, which the current payload casts to, until the payload is written again; see `Sent`."""
        self._sent = Sent(self.payload._version, codes, scale_inv)

    def sent_again(self) -> None:
        """Say that a CUDA graph has written the payload, and the codes that it casts to, in the same memory."""
        assert self._sent is not None
        self._sent.version = self.payload._version

    @torch.no_grad()
    def measure(self, cast: Cast, rows: int, peers: Peers) -> Sent:
        """Cast this weight by itself, with an all-reduce of its amax over the ranks of `peers`; `rows` per rank."""
        amax = peers.all_reduce(TENSORWISE.amax(self.payload), dist.ReduceOp.MAX, "the amax of a weight")
        return self.cast(cast, rows, amax)

    @torch.no_grad()
    def cast(self, cast: Cast, rows: int, amax: torch.Tensor) -> Sent:
        """Cast this weight by itself; `rows` per rank, `amax` FP32 0-dim of the whole stored weight."""
        multiplier, scale_inv = scales_of_weights(cast, amax, self.scale_inv)
        before = self._sent
        (kept,) = aligned(scale_inv.view(1)) if before is None else (before.scale_inv.copy_(scale_inv),)
        codes = self.payload.new_zeros((rows, *self.payload.shape[1:]), dtype=torch.uint8)
        codes[: len(self.payload)] = ops.cast(self.payload, multiplier, cast.format.dtype).view(torch.uint8)
        self.send(codes, kept)
        assert self._sent is not None
        return self._sent

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """torch's extension point: return the whole weight in FP8, in the gathered memory, presenting itself in `param_dtype`."""
        scale_inv, dtype = metadata
        if out is None:
            return ShardedWeight(all_gather_outputs[0].view(dtype), scale_inv, param_dtype), ()
        assert isinstance(out, ShardedWeight)
        out.scale_inv = scale_inv  # the same memory in every step; its payload is the gathered memory
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        sent, self._sent = self._sent, None
        try:
            return _rebuild_rows, super().__reduce_ex__(protocol)
        finally:
            self._sent = sent

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = _CUTS.get(func)
        return super().__torch_dispatch__(func, types, args, kwargs) if op is None else op(func, *args, **(kwargs or {}))


class GatheredCodes:
    """The FP8 codes and scales that all weights of one cast send, each in memory that is allocated once.

    Args:
        cast: of the weights in the GEMMs of their layers, with one scale per tensor and a rule that the kernels implement.
        shapes: for each weight the shape of what this rank sends, with padding.
        device: of the weights.
    """

    def __init__(self, cast: Cast, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._cast, self._tables = cast, Tables(device)
        rooms = [-(-shape.numel() // ALIGNMENT) * ALIGNMENT for shape in shapes]
        self._flat = torch.zeros(sum(rooms), dtype=torch.uint8, device=device).view(cast.format.dtype)
        parts = self._flat.view(torch.uint8).split(rooms)
        self._codes = [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._starts = [sum(rooms[:i]) for i in range(len(rooms))]
        self._scales = torch.empty(len(shapes), 4, dtype=torch.float32, device=device)[:, 0]  # each aligned to 16 bytes, for cuBLAS
        self._scale_invs = self._scales.unbind()

    @torch.no_grad()
    def take(self, weights: Sequence[ShardedWeight], amaxes: torch.Tensor) -> None:
        """Cast all weights in one launch; `amaxes` FP32 [weights] of the whole stored weights."""
        stored = torch.stack([weight.scale_inv for weight in weights])
        multipliers, scale_invs = scales_of_weights(self._cast, amaxes, stored)
        self._scales.copy_(scale_invs)
        payloads = [weight.payload for weight in weights]
        pieces = [(i, 0, x.numel(), start) for i, (x, start) in enumerate(zip(payloads, self._starts, strict=True)) if x.numel()]
        if pieces:
            ops.pack(self._tables, payloads, pieces, self._flat, multipliers)
        for weight, codes, scale_inv in zip(weights, self._codes, self._scale_invs, strict=True):
            weight.send(codes, scale_inv)


def _same_scale(func: Any, x: ShardedWeight, *args: Any, **kwargs: Any) -> Any:
    result = func(x.payload, *args, **kwargs)
    parts = [ShardedWeight(part, x.scale_inv, x.dtype) for part in (result if isinstance(result, list | tuple) else [result])]
    return parts if isinstance(result, list | tuple) else parts[0]


def _copy_(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if isinstance(target, ShardedWeight) and not (isinstance(source, ScalingTensor) and source.payload.dtype == target.payload.dtype):
        raise ValueError(
            f"cannot copy {getattr(source, 'payload', source).dtype} values to a sharded FP8 weight of {target.payload.dtype}: each rank "
            "would scale its rows separately; load the model before fully_shard, or with msamp.integrations.fsdp.load_model"
        )
    return ScalingTensor.__torch_dispatch__(func, (), (target, source, non_blocking))


c10d = torch.ops._c10d_functional


def _gathered(func: Any, x: ShardedWeight, *args: Any) -> ShardedWeight:
    """Gather the rows, as bytes, since not every backend sends float8."""
    flat = c10d.wait_tensor(func(x.payload.view(torch.uint8), *args))
    return ShardedWeight(flat.view(x.payload.dtype), x.scale_inv, x.dtype)


def _not_scattered(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "torch cannot scatter a whole FP8 weight to its shards; load a full state dict with msamp.integrations.fsdp.load_model"
    )


def _rebuild_rows(rebuild: Callable[..., ScalingTensor], state: tuple[Any, ...]) -> ScalingTensor:
    x = rebuild(*state)
    return x if isinstance(x, nn.Parameter) else ShardedWeight(x.payload, x.scale_inv, x.dtype)


torch.serialization.add_safe_globals([_rebuild_rows])

# The operations with which fully_shard shards a parameter and pads its rows, and DTensor gathers them (torch.distributed.checkpoint).
_CUTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.split.Tensor, aten.slice.Tensor, aten.as_strided.default, aten.constant_pad_nd.default), _same_scale),
    c10d.all_gather_into_tensor.default: _gathered,
    # The wait for it, which is over; newer torch has both.
    **{getattr(c10d, name).default: lambda func, x: x for name in ("wait_tensor", "_wrap_tensor_autograd") if hasattr(c10d, name)},
    aten.empty_like.default: _not_scattered,
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_empty.default),
        lambda func, x, size, **_: ShardedWeight(x.payload.new_zeros(size), x.scale_inv.clone(), x.dtype),
    ),
    aten.copy_.default: _copy_,
}
