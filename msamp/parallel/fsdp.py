"""FSDP2 with FP8: weights that `torch.distributed.fsdp.fully_shard` shards by rows and gathers in FP8, and our optimizer on the shards.

`fully_shard` stores a shard of each parameter's rows on each rank, gathers the whole parameter before a forward or backward, and
reduce-scatters gradients into shards. The weights of FP8 layers are `ShardedWeight`s, which are gathered at one byte per element.
`FSDP.measure` casts all of them after each update, with one small all-reduce and one launch.

`FSDP` is the optimizer's `Shard`: each rank updates its rows. Rows share the scales of their tensor, like pieces under greedy ZeRO, COAT's
groups are within rows, and the norm is summed in integers. So for the same gradients, weights and states do not depend on the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as CutAlong

from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.cast_scales import own_rule
from msamp.numerics.formats import Format, by_name
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Cast
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor, contiguous, fp32_values
from msamp.optim.shard import Holding, Shard
from msamp.optim.states import begun, copy_of_rows, is_scaled, local, make_master, payload, scale_inv, weight_format
from msamp.optim.updates import formats_of, kept_states
from msamp.parallel.sharded_weight import GatheredCodes


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

    def master(self, fmt: Format, values: torch.Tensor | None) -> torch.Tensor:
        """These rows of a whole master (`values`), or, from an FP8 weight alone, a master whose scale has room for any of its codes."""
        if values is not None:
            rows = copy_of_rows(values, self.rows or slice(None))
            return make_master(self.weight, fmt, rows) if not isinstance(rows, ScalingTensor) else rows.to(self.weight.device)
        if not (fmt.scaled and is_scaled(self.weight)):
            return make_master(self.weight, fmt)
        scale = scale_from_amax(TENSORWISE.amax(fp32_values(self.whole)), fmt.max)
        return ScalingTensor.quantize(fp32_values(self.weight), fmt, scale, torch.float32)

    @property
    def whole(self) -> torch.Tensor:
        """Of an FP8 weight the largest value that its scale can store, which every rank knows."""
        if not (is_scaled(self.weight) and payload(self.weight).itemsize == 1):
            return self.param
        fmt = weight_format(self.weight)
        largest = torch.full((1,), fmt.max, device=self.weight.device).to(fmt.dtype)
        return ScalingTensor(largest, scale_inv(self.weight), torch.float32)  # type: ignore[arg-type]

    def as_written(self) -> torch.Tensor:
        return self.weight


class FSDP(Shard):
    """The `Shard` (`msamp.optim.shard`) of a LowPrecisionOptimizer whose parameters `fully_shard` has sharded.

    The gradient is FSDP's average in `p.grad`; the step quantizes it with one scale for all ranks.

    Args:
        casts: for each parameter that is gathered in FP8, its cast in the GEMMs of its layer.
        group: the ranks of the mesh.

    Attributes:
        peers: these ranks, with a counter of the bytes sent for scales and the norm.
    """

    def __init__(self, casts: Mapping[torch.Tensor, Cast], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.casts, self.peers = casts, Peers(group, WireBytes())
        self.ranks = self.peers.ranks
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        self._codes: dict[Cast, GatheredCodes] = {}

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for a parameter that is not sharded along dim 0, or a vector that would be cut within its moments' groups."""
        for i, (p, formats) in enumerate(zip(group["params"], formats_of(group), strict=True)):
            name = f"parameter {i} of a group, of shape {tuple(p.shape)},"
            check_cut(name, p)
            grouped = {fmt.name for _, fmt in kept_states(p, formats) if fmt.group}
            if p.dim() == 1 and grouped and self.ranks > 1:
                raise ValueError(
                    f"{name} has moments in {', '.join(grouped)}, whose groups are along dim 0 of a vector, where FSDP2 cuts it over "
                    f"{self.ranks} ranks; use other formats for vectors: recipe coat has FP32"
                )

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        own: list[Holding] = []
        for whole in wholes:
            assert isinstance(whole.param, DTensor)
            now = local(whole.param)
            # Always the same object, although FSDP replaces its padded rows when a model is loaded.
            weight = self._held.setdefault(whole.param, now)
            if isinstance(weight, ScalingTensor) and weight is not now:
                weight.payload, weight.scale_inv = now.payload, now.scale_inv
            if weight.numel():
                rows = rows_of(whole.param, self.peers.rank)
                own.append(Rows(whole.param, whole.group, whole.formats, whole.index, weight, rows, len(own), key=whole.key))
        return own

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

    @torch.no_grad()
    def measure(self) -> None:
        """Cast all weights for the next gathers, from their current amaxes, with one small all-reduce and one launch per cast."""
        casts = self._to_cast()
        if not casts:
            return
        amaxes = TENSORWISE.amaxes([payload(p) for p in casts])
        amaxes = self.peers.all_reduce(amaxes, dist.ReduceOp.MAX, "the amaxes of weights")
        weights = [local(p) for p in casts]
        # What a rank sends of a sharded parameter: its rows, padded to the rows per rank.
        shapes = [torch.Size((-(-p.shape[0] // p.device_mesh.size()), *p.shape[1:])) for p in casts]  # type: ignore[attr-defined]
        for cast, places in _places(list(casts.values())).items():
            if own_rule(cast):
                for place in places:
                    weights[place].cast(cast, shapes[place][0], amaxes[place])
                continue
            if cast not in self._codes:
                self._codes[cast] = GatheredCodes(cast, [shapes[place] for place in places], amaxes.device)
            self._codes[cast].take([weights[place] for place in places], _some(amaxes, places))

    @property
    def stale(self) -> bool:
        """Whether something wrote a weight since the codes that it sends were cast."""
        return any(local(p).sent is None for p in self._to_cast())

    def replayed(self) -> None:
        """Do the host's part of `measure` after the replay of a CUDA graph that contains it."""
        for p in self._to_cast():
            local(p).sent_again()

    def _to_cast(self) -> dict[torch.Tensor, Cast]:
        """Return the weights that are not gathered as they are stored, with their casts."""
        return {p: cast for p, cast in self.casts.items() if payload(p).dtype != cast.format.dtype}

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], *, everywhere: bool = False
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Gather the states of whole parameters, tensor by tensor, on the CPU of the first rank; collective."""
        own_states = {holding.index: state.get(holding.weight, {}) for holding in self.holdings(wholes)}
        steps = torch.full((len(wholes),), -1.0, device=wholes[0].param.device, dtype=torch.float32)
        for index, states in own_states.items():
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
            states = {key: self.whole(own_states.get(whole.index, empty)[key], whole.param) for key in empty}
            if everywhere or self.peers.rank == 0:
                whole_states[whole.index] = {"step": step.clone(), **{key: x.cpu() for key, x in states.items()}}
        return whole_states

    def whole(self, rows: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor on every rank, from each rank's rows of `p`, or from a state with other columns; collective."""
        assert isinstance(p, DTensor)
        held, scale = payload(rows).contiguous(), scale_inv(rows)
        width = held.shape[1:].numel()
        shares = [rows_of(p, rank) for rank in range(self.ranks)]
        sizes = [(share.stop - share.start) * width for share in shares]
        length = p.shape[0] if self.ranks > 1 else len(held)  # one rank may have a vector's groups, which are fewer than its elements
        flat = self.peers.all_gather(held.view(-1), sizes, "a tensor in rows").view(length, *held.shape[1:])
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
