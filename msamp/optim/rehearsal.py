"""What the coming update will compute and what of it will be stored, before anything has changed: for whoever measures the loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import Batch
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.tables import Tables
from msamp.numerics import mcf
from msamp.numerics.range_expand import Expanded
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.adamw import FP8AdamW, Piece

ROWS = 2**24  # elements rehearsed at a time: a dozen FP32 copies of 64 MiB


@dataclass(frozen=True)
class Rehearsal:
    """Some rows of a piece.

    Attributes:
        piece: whose.
        before: the master's values, FP32.
        wanted: "master", "m" and "v" as the update computes them, FP32, and "weight", the stored master, where a weight is cast from it.
        stored: the same names as they will be stored: plain, or ScalingTensors; COAT's moments and Collage's pairs as their FP32 values.
    """

    piece: Piece
    before: torch.Tensor
    wanted: dict[str, torch.Tensor]
    stored: dict[str, torch.Tensor]


@torch.no_grad()
def rehearse(optimizer: FP8AdamW) -> Iterator[Rehearsal]:
    """The next `step` of `optimizer` with the gradients that are there, rows by rows, on copies. Where it will be skipped, nothing; on a
    GPU, which is not waited for, an update that changes nothing.

    The stored values are those of the step's own kernels, and so are the wanted ones, from states that are FP32 and are not rounded. A
    parameter before its first update has no states, and is left out. Takes the collectives that a step takes. At most `ROWS` elements are
    there twice, a dozen bytes each stored and in FP32.
    """
    pieces = [piece for piece in optimizer._ready() if optimizer.state.get(piece.weight)]
    table, _, coefficient, usable = optimizer._decide(pieces)
    if not usable.is_cuda and not usable:
        return
    tables = Tables(table.device)  # its own: those of the optimizer are what captured graphs read
    by_place = {piece.place: piece for piece in pieces}
    kept = table.new_zeros(3, 1 + max(by_place, default=0))
    for number, batch, even in optimizer._batches(pieces):
        group, hyper = optimizer.param_groups[number], optimizer._hyper(number)
        for twin in _parts(batch):
            before = [_own_values(x) for x in _whole(twin.masters, twin.weight_remainders)]
            exact = replace(
                twin,
                ms=[_own_values(x) for x in twin.ms],
                vs=[_own_values(x) for x in _whole(twin.vs, twin.v_remainders)],
                masters=[x.clone() for x in before],
                weights=[],
                steps=[x.clone() for x in twin.steps],
            )
            (ops.adamw if even else reference_adamw)(tables, exact, hyper, table, kept, coefficient, usable, decoupled=group["decoupled"])
            update = group["formats"]["update"]
            if update != "fp32":
                (ops.collage if even else reference_collage)(tables, twin, hyper, update, coefficient, usable)
            else:
                coat = any(isinstance(states[0], Expanded) for states in (twin.ms, twin.vs))
                kernel, slow = (ops.coat_adamw, reference_coat_adamw) if coat else (ops.adamw, reference_adamw)
                (kernel if even else slow)(tables, twin, hyper, table, kept, coefficient, usable, decoupled=group["decoupled"])
            masters, vs = _whole(twin.masters, twin.weight_remainders), _whole(twin.vs, twin.v_remainders)
            for i, place in enumerate(twin.places):
                wanted = {"master": exact.masters[i], "m": exact.ms[i], "v": exact.vs[i]}
                stored = {"master": masters[i], "m": _plain(twin.ms[i]), "v": _plain(vs[i])}
                if twin.weights:
                    wanted["weight"], stored["weight"] = fp32_values(twin.masters[i]), twin.weights[i]
                yield Rehearsal(by_place[place], before[i], wanted, stored)


def _whole(states: list[Any], remainders: list[torch.Tensor]) -> list[Any]:
    """The values of pairs in FP32; without remainders the states as they are."""
    if not remainders:
        return states
    return [x.float() + y.float() for x, y in map(mcf.load_pair, states, remainders)]


def _parts(batch: Batch) -> Iterator[Batch]:
    """Copies of the tensors of a batch: several small ones at a time, or some rows of a large one."""
    group: list[dict[str, Any]] = []
    for i, g in enumerate(batch.grads):
        rows = max(1, ROWS // max(1, math.prod(g.shape[1:])))
        for start in range(0, g.shape[0] if g.dim() else 1, rows):
            part = slice(start, start + rows)
            one = {name: _copy(column[i], part) for name, column in vars(batch).items() if column}
            if group and sum(other["grads"].numel() for other in (*group, one)) > ROWS:
                yield _joined(group)
                group = []
            group.append(one)
    if group:
        yield _joined(group)


def _joined(group: list[dict[str, Any]]) -> Batch:
    return Batch(**{name: [one[name] for one in group if name in one] for name in (field.name for field in fields(Batch))})


def _plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, Expanded) else x


def _own_values(x: Any) -> torch.Tensor:
    """FP32 values in memory of their own."""
    return x.to(torch.float32, copy=True) if type(x) is torch.Tensor else fp32_values(_plain(x))


def _copy(x: Any, rows: slice) -> Any:
    if isinstance(x, int):
        return x
    if isinstance(x, Expanded):
        return Expanded(x.payload[rows].clone() if x.payload.dim() else x.payload.clone(), x.max[rows].clone(), x.k[rows].clone())
    if isinstance(x, ScalingTensor):
        return ScalingTensor(x.payload[rows].clone(), x.scale_inv.clone(), x.dtype)
    return x.detach()[rows].clone() if x.dim() else x.detach().clone()
