"""What the coming update will compute and what of it will be stored, before anything has changed: for whoever measures the loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from msamp.kernels.reference.adamw import Batch, adamw
from msamp.kernels.reference.coat_adamw import coat_adamw
from msamp.kernels.reference.collage import collage
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
    """The next `step` of `optimizer` with the gradients that are there, rows by rows, on copies; nothing where it will be skipped.

    The stored values are those of the update's reference twin, and so are the wanted ones, from states that are FP32 and are not
    rounded. A parameter before its first update has no states, and is left out. Takes the collectives that a step takes, and waits for
    the device.
    """
    pieces = [piece for piece in optimizer._ready() if optimizer.state.get(piece.weight)]
    table, _, coefficient, usable = optimizer._decide(pieces)
    if not usable:
        return
    by_place = {piece.place: piece for piece in pieces}
    kept = table.new_zeros(3, 1 + max(by_place, default=0))
    for number, batch, _ in optimizer._batches(pieces):
        group, hyper = optimizer.param_groups[number], optimizer._hyper(number)
        for twin in _parts(batch):
            before = [fp32_values(x).clone() for x in _whole(twin.masters, twin.weight_remainders)]
            exact = replace(
                twin,
                ms=[_values(x).clone() for x in twin.ms],
                vs=[_values(x).clone() for x in _whole(twin.vs, twin.v_remainders)],
                masters=[x.clone() for x in before],
                weights=[],
                steps=[x.clone() for x in twin.steps],
            )
            adamw(None, exact, hyper, group["decoupled"], table, kept, coefficient, usable)
            if group["formats"]["update"] == "fp32":  # and `adamw` where no moments are COAT's
                coat_adamw(None, twin, hyper, group["decoupled"], table, kept, coefficient, usable)
            else:
                collage(None, twin, hyper, group["formats"]["update"], coefficient, usable)
            masters, vs = _whole(twin.masters, twin.weight_remainders), _whole(twin.vs, twin.v_remainders)
            for i, place in enumerate(twin.places):
                wanted = {"master": exact.masters[i], "m": exact.ms[i], "v": exact.vs[i]}
                stored = {"master": masters[i], "m": _plain(twin.ms[i]), "v": _plain(vs[i])}
                if twin.weights:
                    wanted["weight"], stored["weight"] = fp32_values(twin.masters[i]), twin.weights[i]
                yield Rehearsal(by_place[place], before[i], wanted, stored)


def _whole(states: list[Any], remainders: list[torch.Tensor]) -> list[Any]:
    """The values of pairs in FP32; without remainders the states as they are."""
    return [x.float() + y.float() for x, y in zip(states, remainders, strict=True)] if remainders else states


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


def _values(x: Any) -> torch.Tensor:
    return fp32_values(_plain(x))


def _copy(x: Any, rows: slice) -> Any:
    if isinstance(x, int):
        return x
    if isinstance(x, Expanded):
        return Expanded(x.payload[rows].clone() if x.payload.dim() else x.payload.clone(), x.max[rows].clone(), x.k[rows].clone())
    if isinstance(x, ScalingTensor):
        return ScalingTensor(x.payload[rows].clone(), x.scale_inv.clone(), x.dtype)
    return x.detach()[rows].clone() if x.dim() else x.detach().clone()
