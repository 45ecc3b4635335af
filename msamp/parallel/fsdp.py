"""FSDP2 with FP8: weights that `torch.distributed.fsdp.fully_shard` shards by rows and gathers in FP8, and our optimizer on the shards.

`fully_shard` stores a shard of each parameter's rows on each rank, gathers the whole parameter before a forward or backward, and
reduce-scatters gradients into shards. A tensor subclass can define what is gathered: `fsdp_pre_all_gather` returns the bytes that this rank
sends, and `fsdp_post_all_gather` turns all ranks' bytes into the parameter with which the layer computes. `ShardedWeight` is such a
subclass. Between steps it is a ScalingTensor in FP16 with one scale for all ranks. It sends one byte per element: the FP8 codes that the
GEMM would use on one process. So the ranks must know the amax of the whole weight before they cast their rows. `FSDP.measure` measures all
weights after each update, with one small all-reduce. A weight that something else wrote since is measured when it is gathered.

`FSDP` is the optimizer's `Shard`: each rank updates its rows. Rows share the scales of their tensor, like pieces under greedy ZeRO, and the
norm is summed in integers. So for the same gradients, weights and states do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as CutAlong

from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import ops
from msamp.kernels.scalar_pool import aligned
from msamp.nn.cast_scales import own_rule, scales_of_weights
from msamp.nn.linear import FP8Linear
from msamp.numerics.formats import by_name
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Cast
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import contiguous
from msamp.optim.grad_cast import GradCast
from msamp.optim.kept_states import kept_states
from msamp.optim.shard import Holding
from msamp.optim.states import begun, is_scaled, local, payload, scale_inv

aten = torch.ops.aten


class ShardedWeight(ScalingTensor):
    """The weight of an FP8Linear that `fully_shard` can shard along dim 0: a ScalingTensor, whose rows are ScalingTensors with its scale.

    Only the optimizer, or a copy from another ScalingTensor, can write it. Writing plain values raises, since each rank would quantize its
    rows with a scale of its own.
    """

    # Version of the payload, multiplier to FP8, scale_inv of the gathered weight.
    _scales: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def set_amax(self, amax: torch.Tensor, cast: Cast) -> None:
        """Set the scales of the gathered weight from the amax of the whole stored weight, FP32 0-dim."""
        self.set_scale(*scales_of_weights(cast, amax, self.scale_inv))

    def set_scale(self, multiplier: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Set the scales of the gathered weight, valid until the rows are written again.

        multiplier: from the stored payload to FP8, FP32 0-dim.
        scale_inv: of the gathered weight, FP32 0-dim.
        """
        self._scales = (self.payload._version, multiplier, scale_inv)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """torch's extension point: return this rank's rows as FP8 bytes, padded to the rows per rank, and the scale_inv."""
        assert isinstance(module, FP8Linear)
        cast = module.scaling.gemm.weight
        if self._scales is None or self._scales[0] != self.payload._version:
            peers = Peers(mesh.get_group(), WireBytes())
            self.set_amax(peers.all_reduce(TENSORWISE.amax(self.payload), dist.ReduceOp.MAX, "the amax of a weight"), cast)
        assert self._scales is not None
        _, multiplier, scale_inv = self._scales
        codes = ops.cast(self.payload, multiplier, cast.format.dtype).view(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())
        if len(codes) < rows:
            codes = torch.cat([codes, codes.new_zeros(rows - len(codes), *codes.shape[1:])])
        return (codes,), (scale_inv, cast.format.dtype)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """torch's extension point: return the whole weight in FP8, in the gathered memory, presenting itself in `param_dtype`."""
        scale_inv, dtype = metadata
        if out is None:
            return ShardedWeight(all_gather_outputs[0].view(dtype), scale_inv.clone(), param_dtype), ()
        assert isinstance(out, ShardedWeight)
        out.scale_inv.copy_(scale_inv)  # its payload is the gathered memory
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        scales, self._scales = self._scales, None
        try:
            return super().__reduce_ex__(protocol)
        finally:
            self._scales = scales

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = _CUTS.get(func)
        return super().__torch_dispatch__(func, types, args, kwargs) if op is None else op(func, *args, **(kwargs or {}))


def _same_scale(func: Any, x: ShardedWeight, *args: Any, **kwargs: Any) -> Any:
    made = func(x.payload, *args, **kwargs)
    parts = [ShardedWeight(part, x.scale_inv, x.dtype) for part in (made if isinstance(made, list | tuple) else [made])]
    return parts if isinstance(made, list | tuple) else parts[0]


def _new(func: Any, x: ShardedWeight, size: Any, **kwargs: Any) -> ShardedWeight:
    return ShardedWeight(x.payload.new_zeros(size), x.scale_inv.clone(), x.dtype)


def _copy_(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if isinstance(target, ShardedWeight) and not (isinstance(source, ScalingTensor) and source.payload.dtype == target.payload.dtype):
        raise ValueError(
            f"cannot copy {getattr(source, 'payload', source).dtype} values to a sharded FP8 weight of {target.payload.dtype}: each rank "
            "would scale its rows separately; load the model before fully_shard, or with msamp.integrations.fsdp.load_model"
        )
    return ScalingTensor.__torch_dispatch__(func, (), (target, source, non_blocking))


# The operations with which fully_shard shards a parameter and pads its rows.
_CUTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.split.Tensor, aten.slice.Tensor, aten.as_strided.default), _same_scale),
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default), _new),
    aten.copy_.default: _copy_,
}


def rows_of(p: DTensor, rank: int) -> slice:
    """Return a rank's rows of a parameter that `fully_shard` has sharded: equal shards, the last ones smaller or empty."""
    share = -(-p.shape[0] // p.device_mesh.size())
    start = min(rank * share, p.shape[0])
    return slice(start, min(start + share, p.shape[0]))


def check_cut(name: str, p: torch.Tensor) -> None:
    """Raise a ValueError naming the parameter if it is not sharded along dim 0 over a one-dimensional mesh."""
    if not isinstance(p, DTensor):
        raise ValueError(f"{name} is not sharded; call torch.distributed.fsdp.fully_shard(model) before the optimizer is built")
    if p.device_mesh.ndim != 1 or p.placements != (CutAlong(0),):
        raise ValueError(
            f"{name} is placed as {p.placements} on a mesh of {p.device_mesh.ndim} dimensions; FP8 weights must be sharded along dim 0 "
            "over a mesh of one dimension: remove shard_placement_fn, HSDP and tensor parallelism"
        )


@dataclass(eq=False)
class Rows(Holding):
    """This rank's rows of a parameter that no process has as a whole."""

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def as_written(self) -> torch.Tensor:
        return self.weight


class FSDP:
    """The `Shard` (`msamp.optim.shard`) of an FP8AdamW whose parameters `fully_shard` has sharded.

    The gradient is FSDP's average in `p.grad`; the step quantizes it with one scale for all ranks.

    Args:
        casts: for each parameter that is gathered in FP8, its cast in the GEMMs of its layer.
        group: the ranks of the mesh.

    Attributes:
        peers: these ranks, with a counter of the bytes sent for scales and the norm.
    """

    def __init__(self, casts: Mapping[torch.Tensor, Cast], group: dist.ProcessGroup) -> None:
        self.casts, self.peers = casts, Peers(group, WireBytes())
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        self._grad_cast = GradCast()

    @property
    def ranks(self) -> int:
        return self.peers.ranks

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for a parameter that is not sharded along dim 0."""
        for i, p in enumerate(group["params"]):
            check_cut(f"parameter {i} of a group, of shape {tuple(p.shape)},", p)

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        own: list[Holding] = []
        for whole in wholes:
            assert isinstance(whole.param, DTensor)
            weight = self._weight(whole.param)
            if weight.numel():
                rows = rows_of(whole.param, self.peers.rank)
                own.append(Rows(whole.param, whole.group, whole.formats, whole.index, weight, rows, len(own), key=whole.key))
        return own

    def _weight(self, p: torch.Tensor) -> torch.Tensor:
        """Return this process's rows, always as the same object, although FSDP replaces its padded rows when a model is loaded."""
        now = local(p)
        held = self._held.setdefault(p, now)
        if isinstance(held, ScalingTensor) and held is not now:
            held.payload, held.scale_inv = now.payload, now.scale_inv
        return held

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        grads = {whole.index: contiguous(local(whole.param.grad)) for whole in wholes if whole.param.grad is not None}
        formats = {whole.index: by_name(whole.formats["grad"]) for whole in wholes}
        scaled = [i for i in grads if formats[i].scaled]
        if scaled:  # every rank takes part, even without rows
            amaxes = TENSORWISE.amaxes([grads[i] for i in scaled])
            amaxes = self.peers.all_reduce(amaxes, dist.ReduceOp.MAX, "the amaxes of gradients")
            for fmt, places in _places([formats[i] for i in scaled]).items():
                wanted = [scaled[place] for place in places]
                grads |= dict(zip(wanted, self._grad_cast([grads[i] for i in wanted], fmt, _some(amaxes, places)), strict=True))
        plain = [i for i in grads if not formats[i].scaled]
        for fmt, places in _places([formats[i] for i in plain]).items():
            wanted = [plain[place] for place in places]
            grads |= dict(zip(wanted, self._grad_cast([grads[i] for i in wanted], fmt), strict=True))
        own = [holding for holding in self.holdings(wholes) if holding.index in grads]
        for holding in own:
            holding.grad = grads[holding.index]
        return own

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        return self.peers.all_reduce(table, dist.ReduceOp.MAX, "the amaxes of gradients and optimizer states")

    def total(self, table: torch.Tensor) -> torch.Tensor:
        return self.peers.all_reduce(table, dist.ReduceOp.SUM, "the gradient norm")

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """FSDP gathers weights itself. A rank without rows only takes the scale that the others stored."""
        for p, new in scale_invs.items():
            local(p).scale_inv.copy_(new)

    def wait(self) -> None:
        """Do nothing: no weights are being gathered between steps."""

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the scales for the next gather of all weights, from their current amaxes, with one small all-reduce."""
        amaxes = TENSORWISE.amaxes([payload(p) for p in self.casts])
        amaxes = self.peers.all_reduce(amaxes, dist.ReduceOp.MAX, "the amaxes of weights")
        weights = [local(p) for p in self.casts]
        for cast, places in _places(list(self.casts.values())).items():
            if own_rule(cast):
                for place in places:
                    weights[place].set_amax(amaxes[place], cast)
                continue
            stored = torch.stack([weights[place].scale_inv for place in places])
            multipliers, scale_invs = scales_of_weights(cast, _some(amaxes, places), stored)
            for place, multiplier, gathered in zip(places, multipliers.unbind(), aligned(scale_invs), strict=True):
                weights[place].set_scale(multiplier, gathered)

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Gather the states of whole parameters, tensor by tensor, on the CPU of the first rank; collective."""
        mine = {holding.index: state.get(holding.weight, {}) for holding in self.holdings(wholes)}
        steps = torch.full((len(wholes),), -1.0, device=wholes[0].param.device, dtype=torch.float32)
        for index, states in mine.items():
            if states:
                steps[index] = states["step"]
        steps = self.peers.all_reduce(steps, dist.ReduceOp.MAX, "the optimizer's step counts", None).cpu()
        whole_states: dict[int, dict[str, torch.Tensor]] = {}
        for whole, step in zip(wholes, steps, strict=True):
            if step < 0:
                continue
            empty = {
                key: x
                for declared, fmt in kept_states(whole.param, whole.formats)
                for key, x in begun(declared.key, fmt, local(whole.param)).items()
            }
            states = {key: self.whole(mine.get(whole.index, empty)[key], whole.param) for key in empty}
            if self.peers.rank == 0:
                whole_states[whole.index] = {"step": step.clone(), **{key: x.cpu() for key, x in states.items()}}
        return whole_states

    def whole(self, rows: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor on every rank, from each rank's rows, which are those of `p`; collective."""
        assert isinstance(p, DTensor)
        held, scale = payload(rows).contiguous(), scale_inv(rows)
        width = p.shape[1:].numel()
        shares = [rows_of(p, rank) for rank in range(self.ranks)]
        sizes = [(share.stop - share.start) * width for share in shares]
        flat = self.peers.all_gather(held.view(-1), sizes, "a tensor in rows").view(p.shape)
        if scale is None:
            return flat
        scale = self.peers.all_reduce(scale.clone() if len(held) else torch.zeros_like(scale), dist.ReduceOp.MAX, "its scale")
        return ScalingTensor(flat, scale, rows.dtype)


def _places(kinds: Sequence[Any]) -> dict[Any, list[int]]:
    """Map each kind to its positions in a list."""
    by_mesh: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        by_mesh.setdefault(kind, []).append(place)
    return by_mesh


def _some(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the values at some positions, without a copy if these are all."""
    return values if len(places) == len(values) else torch.stack([values[place] for place in places])


def sharded_casts(model: nn.Module) -> dict[torch.Tensor, Cast]:
    """Return parameter -> cast for the weights of a sharded model's FP8 layers."""
    return {
        layer.weight: layer.scaling.gemm.weight for layer in model.modules() if isinstance(layer, FP8Linear) and is_scaled(layer.weight)
    }
