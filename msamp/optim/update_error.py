"""Run the next update on copies, exactly and as it will be stored, to measure its rounding error before anything changes.

`lost_updates` is the fraction that rounding of the masters loses: a master in FP16, BF16 or FP8 cannot represent an update far below its
last digit, and rounding to nearest returns the old weight. The loss then decreases more slowly or not at all, and nothing else shows why.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from msamp.kernels.tables import Tables
from msamp.numerics import mcf
from msamp.numerics.formats import FP32
from msamp.numerics.metrics import undelivered_share
from msamp.numerics.range_expand import Expanded
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim import updates
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.shard import Holding
from msamp.optim.states import copy_of_rows, decoded, own_values, parameter_names, payload, weight_format
from msamp.optim.updates import MASTER, WEIGHT, State, StepInputs, UpdateBatch

ROWS = 2**24  # elements copied at a time: about twelve FP32 copies of 64 MiB
SAMPLE = 2**15  # elements per matrix: with stochastic rounding, updates of 1/1000 of a code then have a noise of 0.17 in their fraction
SUMS = 2  # per parameter: the wanted distance, and the part of it that is stored
SAMPLED = 2**20  # elements at a time in a sample, which must not raise the peak memory of a step


@dataclass(frozen=True)
class Rehearsal:
    """The next update of some rows of a holding.

    Attributes:
        holding: the holding that has these rows.
        before: the master's values, FP32.
        wanted: the exact results of the update, FP32, under `MASTER.column` and the column of each state. If the weight is cast from a
            master, `WEIGHT` is the stored master.
        stored: the results under the same names as they will be stored, plain or ScalingTensors; COAT's moments and Collage's pairs as
            FP32 values.
        rounded: the names that are not stored in FP32.
    """

    holding: Holding
    before: torch.Tensor
    wanted: dict[str, torch.Tensor]
    stored: dict[str, torch.Tensor]
    rounded: frozenset[str]


class BothWays(NamedTuple):
    """An update of copies, as it will be stored and with exact FP32 states, in two batches of the same length and order.

    Attributes:
        stored: the batch after the step's own kernels.
        exact: the same batch with FP32 states, without rounding.
        before: the masters' values, FP32.
        holdings: the holdings that have these rows.
    """

    stored: UpdateBatch
    exact: UpdateBatch
    before: list[torch.Tensor]
    holdings: list[Holding]

    def masters(self) -> list[torch.Tensor]:
        """Return the values of the masters (or pairs) as they will be stored, in FP32."""
        return _values(_pair(self.stored, WEIGHT))


@torch.no_grad()
def rehearse(optimizer: LowPrecisionOptimizer) -> Iterator[Rehearsal]:
    """Run the next `step` of `optimizer` on copies with the current gradients, some rows at a time. If the step will be skipped, it yields
    nothing; on a GPU, where the host does not wait to know, it yields an update that changes nothing.

    The step's own kernels compute both the stored and the wanted values, the latter with FP32 states. Parameters without states, before
    their first update, are left out. The collectives are the same as in a step. At most `ROWS` elements are copied at a time, as stored and
    in FP32, about 12 bytes each; an update that requires whole parameters copies at least one parameter.
    """
    for both in rehearse_batches(optimizer):
        yield from _by_holding(both)


@torch.no_grad()
def rehearse_batches(optimizer: LowPrecisionOptimizer, sample: int | None = None) -> Iterator[BothWays]:
    """Like `rehearse`, but yield whole batches.

    Args:
        optimizer: as for `rehearse`.
        sample: update only about this many elements of each matrix, in evenly spaced rows, and all elements of vectors. Gradients are
            still read completely, so the clip coefficient and the scales are the same as in the step. None, or an update that requires
            whole parameters: all elements.
    """
    ready = [holding for holding in optimizer.ready() if optimizer.state.get(holding.weight)]
    decision = optimizer.decide(ready)
    amaxes, coefficient, usable = decision.amaxes, decision.coefficient, decision.usable
    if not usable.is_cuda and not usable:
        return
    tables = Tables(amaxes.device)  # not the optimizer's tables, which captured graphs read
    by_place = {holding.place: holding for holding in ready}
    for batch in optimizer.batches(ready):
        update = batch.update
        exact_update = update if update.in_fp32 is None else updates.by_name(update.in_fp32)
        rows = max(update.master_row, exact_update.master_row)
        kept = amaxes.new_zeros(rows, 1 + max(by_place))
        no_bounds = amaxes.new_zeros(1 + rows, amaxes.shape[1])  # FP32 states have no scales
        for part in _parts(batch) if sample is None or update.whole else _sampled(batch, sample):
            before = _values(_pair(part, WEIGHT))
            exact = replace(
                part,
                states={state.key: _values(_pair(part, state.key)) for state in _numbers(part)},
                masters=_values(before),
                weights=[],
                steps=list(torch.stack(part.steps).unbind()),
            )
            exact_update.run(tables, exact, StepInputs(no_bounds, kept, coefficient, usable))
            update.run(tables, part, StepInputs(amaxes, kept, coefficient, usable))
            yield BothWays(part, exact, before, [by_place[place] for place in part.places])


def _by_holding(both: BothWays) -> Iterator[Rehearsal]:
    """Yield the stored and the exact results of a batch of copies, by holding."""
    part, exact = both.stored, both.exact
    numbers, formats = _numbers(part), part.formats
    stored = {MASTER.column: _pair(part, WEIGHT)} | {state.column: [decoded(x) for x in _pair(part, state.key)] for state in numbers}
    wanted = {MASTER.column: exact.masters} | {state.column: exact.states[state.key] for state in numbers}
    rounded = {state.column for state in numbers if state.format_beside(weight_format(part.masters[0]), formats) != FP32}
    rounded |= {MASTER.column} if weight_format(part.masters[0]) != FP32 else set()
    if part.weights:
        stored[WEIGHT], wanted[WEIGHT] = part.weights, [fp32_values(x) for x in part.masters]
        rounded |= {WEIGHT} if weight_format(part.weights[0]) != FP32 else set()
    for i, holding in enumerate(both.holdings):
        exactly, as_kept = ({name: column[i] for name, column in values.items()} for values in (wanted, stored))
        yield Rehearsal(holding, both.before[i], exactly, as_kept, frozenset(rounded))


def _numbers(batch: UpdateBatch) -> list[State]:
    """Return the states that are not remainders, without the master."""
    return [state for state in batch.update.states if state.remainder_of is None and state != MASTER]


def _pair(batch: UpdateBatch, first: str) -> list[Any]:
    """Return the states under a key, or the masters for `WEIGHT`; if they have remainders, the FP32 values of the pairs."""
    states = batch.masters if first == WEIGHT else batch.states[first]
    for state in batch.update.states:
        if state.remainder_of == first:
            return [x.float() + y.float() for x, y in map(mcf.load_pair, states, batch.states[state.key])]
    return states


def _parts(batch: UpdateBatch) -> Iterator[UpdateBatch]:
    """Yield copies of the tensors of a batch: several small ones at a time, or some rows of a large one."""
    members: list[tuple[int, slice]] = []
    elements = 0
    for i, g in enumerate(batch.grads):
        row, height = math.prod(g.shape[1:]), g.shape[0] if g.dim() else 1
        rows = height + 1 if batch.update.whole else max(1, ROWS // max(1, row))
        for start in range(0, height, rows):
            size = row * min(rows, height - start)
            if members and elements + size > ROWS:
                yield _copied(batch, members)
                members, elements = [], 0
            members.append((i, slice(start, start + rows)))
            elements += size
    if members:
        yield _copied(batch, members)


def _copied(batch: UpdateBatch, members: Sequence[tuple[int, slice]]) -> UpdateBatch:
    """Copy rows of some tensors of a batch."""
    shifts = [rows.start * math.prod(batch.grads[i].shape[1:]) for i, rows in members]
    copies = batch.each(lambda column: [x if isinstance(x := column[i], int) else copy_of_rows(x, rows) for i, rows in members])
    return replace(copies, offsets=[offset + shift for offset, shift in zip(copies.offsets, shifts, strict=True)])


def _sampled(batch: UpdateBatch, sample: int) -> Iterator[UpdateBatch]:
    """Yield copies of evenly spaced rows of a batch's tensors, about `sample` elements of each. Tensors with samples of one size are
    together, so that a few operators copy all of them."""
    alike: dict[torch.Size, list[tuple[int, slice]]] = defaultdict(list)
    for i, g in enumerate(batch.grads):
        row = math.prod(g.shape[1:])
        rows = slice(None)  # all of a vector, whose COAT groups are along dim 0
        if g.dim() > 1 and g.numel() > sample:
            number = max(1, sample // row)
            rows = slice(0, g.shape[0] // number * number, g.shape[0] // number)
        alike[payload(g)[rows].shape if g.dim() else g.shape].append((i, rows))
    for shape, members in alike.items():
        together = max(1, SAMPLED // max(1, shape.numel()))
        for start in range(0, len(members), together):
            indices, chosen = zip(*members[start : start + together], strict=True)
            yield batch.each(functools.partial(_copies, indices=indices, rows=chosen))


def _copies(column: Sequence[Any], indices: Sequence[int], rows: Sequence[slice]) -> list[Any]:
    """Copy some rows of tensors of one kind; all results have the same shape."""
    xs = [column[i] for i in indices]

    def stack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        parts = [x[chosen] if x.dim() else x for x, chosen in zip(tensors, rows, strict=True)]
        return _stack(parts).unbind()

    if isinstance(xs[0], int):
        return list(xs)
    if isinstance(xs[0], ScalingTensor):
        stacked = zip(stack([x.payload for x in xs]), stack([x.scale_inv for x in xs]), xs, strict=True)
        return [ScalingTensor(codes, inv, x.dtype) for codes, inv, x in stacked]
    if isinstance(xs[0], Expanded):
        parts = (stack([getattr(x, name) for x in xs]) for name in ("payload", "max", "k"))
        return [Expanded(*one) for one in zip(*parts, strict=True)]
    return list(stack([x.detach() for x in xs]))


def _values(xs: Sequence[Any]) -> list[torch.Tensor]:
    """Apply `own_values` to tensors of one kind; tensors of the same shape are processed together."""
    if len(xs) == 1 or len({payload(x).shape for x in xs}) > 1:
        return [own_values(x) for x in xs]
    if isinstance(xs[0], ScalingTensor):
        scale_invs = torch.stack([x.scale_inv for x in xs]).view(-1, *[1] * xs[0].dim())
        return list((_stack([x.payload for x in xs]).float() * scale_invs).unbind())
    if isinstance(xs[0], Expanded):
        codes, largest, exponents = (_stack([getattr(x, name) for x in xs]) for name in ("payload", "max", "k"))
        return list(Expanded(codes, largest, exponents).dequantize().unbind())
    return list(_stack([x.detach() for x in xs]).float().unbind())


def _stack(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.stack that also supports FP8."""
    if xs[0].element_size() > 1:
        return torch.stack(list(xs))
    return torch.stack([x.view(torch.uint8) for x in xs]).view(xs[0].dtype)


@torch.no_grad()
def update_distances(optimizer: LowPrecisionOptimizer, sample: int | None = SAMPLE) -> torch.Tensor:
    """Run the next update on copies of some rows, and sum the wanted and the stored changes. It changes nothing and does not wait for the
    device. It runs the collectives with which the ranks decide about a step.

    Args:
        optimizer: with the gradients of its next step in place.
        sample: as for `update_error.rehearse_batches`.

    Returns:
        FP64 [parameters, 2], group by group, on the parameters' device: sums over this process's rows of abs(wanted) and of sign(wanted)
        times the stored change; 0 without an update (no gradient, no state yet, a step that will be skipped, lr 0).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sums = torch.zeros(len(params), SUMS, dtype=torch.float64, device=params[0].device)
    tables = Tables(sums.device)
    for number, both in enumerate(rehearse_batches(optimizer, sample)):
        columns = (both.before, both.exact.masters, both.masters())
        if len({x.shape for x in both.before}) == 1:  # a sample
            distances = _distances(*(torch.stack(xs) for xs in columns))
        else:
            distances = torch.cat([_distances(*(x[None] for x in one)) for one in zip(*columns, strict=True)])
        sums.index_add_(0, tables.send(number, [holding.index for holding in both.holdings]), distances)
    return sums


def _distances(before: torch.Tensor, exact: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return two sums per tensor, FP64 [n, 2], of FP32 [n, ..]: of abs(wanted change), and of the stored change along its sign."""
    wanted, effective = (exact - before).flatten(1), (stored - before).flatten(1)
    return torch.stack([x.sum(1, dtype=torch.float64) for x in (wanted.abs(), wanted.sign() * effective)], 1)


def lost_updates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the fraction of each parameter's next update that rounding will lose, 0 to 1, by the parameter's name.

    Call it between `backward` and `step`, every few hundred steps. It runs the update on copies of at most some ten thousand elements of
    each matrix, waits for the device once, and changes nothing. If a fraction stays above 0.5, the parameter moves less than half as far as
    the learning rate demands. Then use `msamp.initialize(..., master_rounding="stochastic")`, FP32 masters, or a higher learning rate.

    The fraction is 1 - sum sign(wanted) effective / sum abs(wanted). `wanted` is the update of the current states in FP32 arithmetic, and
    `effective` is the change of the stored master. With stochastic rounding it is 0 up to noise. Rounding of the moments does not count.

    Args:
        optimizer: the result of `msamp.initialize`, or a LowPrecisionOptimizer. On several processes the call is collective and averages
            the gradients as `step` would, so no backward may follow before `step`.

    Returns:
        Name -> fraction, the same on all processes that share the optimizer. It is 0 for a parameter without an update: if it is frozen or
        has no gradient, before its first step, at learning rate 0, or if the step will be skipped.

    Raises:
        ValueError: if the optimizer is not one of these.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}; pass the optimizer from msamp.initialize, or a LowPrecisionOptimizer"
        )
    sums = optimizer.shard.total(update_distances(optimizer)).tolist()
    return {name: undelivered_share(*row) for name, row in zip(parameter_names(optimizer), sums, strict=True)}
