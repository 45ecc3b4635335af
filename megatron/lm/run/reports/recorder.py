"""The precision recorder: measures on every N-th step the error of each cast and the part of each update that rounding loses.

A recorded step is bit for bit the usual step, graph or eager: next to each cast, the values before it are recomputed and compared. After
the gradients are averaged, the update runs on copies first. All statistics are computed on the device, in one read of each tensor and its
rounded form; the host reads one table at the end of the step. On other steps nothing is hooked and nothing runs.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.lm.model.initial import named_globally, parameter_names
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.model.moe.layer import TrainedMatrices
from megatron.lm.run.reports.log_line import wrapped
from megatron.lm.shell.logs import LogFile, Unwritten
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Training
from msamp.kernels import ops
from msamp.nn.cast_scales import tally_operand_
from msamp.nn.fp8_attention import CASTS_HERE, AttentionScaling
from msamp.nn.gemm import LayerGemm
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, PRODUCTS, TensorScales
from msamp.numerics import accumulation
from msamp.numerics.metrics import TALLY, add_tallies, judge, undelivered_share
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.update_error import rehearse
from msamp.optim.updates import MASTER

ROWS = {INPUT: "input", GRAD_OUTPUT: "grad_output"}
CAST_COLUMNS = ("amax", "underflow", "saturation", "sqnr_db", "scale_exponent")
SUM_COLUMNS = ("slope", "sqnr_db")
UPDATE_COLUMNS = ("norm", "update_norm", "descent", "lost", "undelivered")
# The sums that `ops.tally_update_` computes for an update, in this order.
UPDATE_SUMS = ("elements", "squares", "wanted squares", "wanted . effective", "lost", "|wanted|", "sign(wanted) . effective")

WORST: dict[str, Callable[[list[float]], float]] = {"underflow": max, "saturation": max, "sqnr_db": min, "slope": min}
SHRUNK = 0.99  # a smaller slope of a layer's sums is warned about once

Key = tuple[str, str]  # name of a layer or parameter in the whole model, and which of its tensors
Rows = dict[Any, list[float]]  # by Key, or of updates by name
Scalars = Callable[[Mapping[str, float] | None, int], None]


class Recorder:
    """Records training steps, each as one JSON line; rank 0 writes the statistics of all ranks.

    Fields of a line: `iteration`; `skipped`, whether the update was skipped; `columns`, the names of the list entries below; `casts`, by
    layer and tensor; `sums`, by layer and product; `updates`, by parameter, and `total` for all; `mu`, with `--grad-scaling auto`;
    `experts`, by layer from 0, of a mixture of experts: each expert's `load` as a share of the choices, and the router's losses and entropy
    (`ExpertLoad.by_layer`); `raised`, with `--fp8-guard`: the layers that this step computed in BF16, with the iteration `since` which, and
    `why` (`casts` are then those that FP8 would have had).

    Tensors of `casts`: `input`, `weight` and `grad_output` as cast for their GEMM; `query`, `key`, `value` and `grad_attention` of FP8
    attention; `grad`, a gradient as sent compared with backward's; `grad_reduced`, the average compared with the FP32 sum; `master`, `m`
    and `v` as stored, compared with the update's FP32 result; `weight`, if it is cast from a master, compared with the master.

    Columns of `sums`: some elements of the products `output`, `grad_input` and `grad_weight` of a linear layer with one scale per tensor
    or of a layer's experts, and of FP8 attention's output, compared with their exact sums from the same codes
    (`msamp.numerics.accumulation`): the slope, below 1 where the tensor cores' sums shrink, and SQNR in dB. The first slope below 0.99 is
    printed as a warning.

    Columns of `casts`: amax of the values before the cast; underflow, the fraction of non-zero values that became zero; saturation, the
    fraction at the format's maximum; SQNR in dB; the exponent of the scale, base 2. Columns of `updates`: norms of the parameter after the
    update, and of the update in FP32 from the same states; descent, the inner product of the update's direction with the change of the
    master (`descent / update_norm` is 1 without loss; Collage's EDQ uses the direction of the optimizer's own arithmetic:
    `msamp.update_quality`); lost, the fraction of elements unchanged by a non-zero update; undelivered, the fraction of the update's
    distance that was lost, `msamp.numerics.metrics.undelivered_share`, about 0 with stochastic rounding, which leaves most elements
    unchanged in one step. null means non-finite, no error (SQNR), or unknown (a sum not in FP32).

    Statistics are over all elements of a tensor, all micro-batches of the step and all ranks. FP32 tensors have no error and are left out,
    as are the updates of a process's first step, where optimizer states may not exist yet.

    Args:
        training: the training state.
        file: to append to.
        interval: records iterations that are multiples of it, and the first of a process, which prepares buffers for graphs.
        scalars: called on every rank with the `summary` of each line, None on ranks other than 0, and its iteration.
        unwritten: counts failed writes; default: a new counter.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, training: Training, file: str, interval: int, scalars: Scalars, unwritten: Unwritten | None = None) -> None:
        self.training, self.interval, self.scalars = training, interval, scalars
        self.recording = False
        self._first = training.iteration + 1
        modules = [module for chunk in chunks(training.model) for module in named_globally(chunk)]
        self.layers = [(name, layer) for name, layer in modules if isinstance(layer, FP8Gemm)]
        # Every measured cast: layer, scales, and the tensors by row.
        self.watched: list[tuple[str, TensorScales, dict[int, str]]] = [
            *((name, layer.scaling, ROWS) for name, layer in self.layers),
            *((name, matrices.scaling, ROWS) for name, matrices in modules if isinstance(matrices, TrainedMatrices)),
            *((name.removesuffix(".scaling"), scales, CASTS_HERE) for name, scales in modules if isinstance(scales, AttentionScaling)),
        ]
        self.names = {p: name.removesuffix(".weight") for p, name in parameter_names(training.model).items()}
        device = next(iter(self.names)).device
        # Static memory, which graphs write.
        self._table = torch.zeros(sum(len(rows) for *_, rows in self.watched), len(TALLY), dtype=torch.float64, device=device)
        self._summed = [(name, scales, PRODUCTS[: 1 if isinstance(scales, AttentionScaling) else None]) for name, scales, _ in self.watched]
        self._sums = torch.zeros(len(self._summed), len(PRODUCTS), len(accumulation.SUMS), dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        self._warned = False
        # Rows on the device: tallies, separately for the update on copies, and sums of updates.
        self._casts: dict[Key, Tensor] = {}
        self._rehearsed: dict[Key, Tensor] = {}
        self._updates: dict[str, Tensor] = {}
        self._file: LogFile | None = None
        if torch.distributed.get_rank() == 0:
            self._file = LogFile(Path(file), f"--record-precision {file}", unwritten or Unwritten())

    def due(self, iteration: int) -> bool:
        """Return whether this iteration is recorded."""
        return iteration == self._first or iteration % self.interval == 0

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Record the `train_step` inside the block, and write the line at its end. Collective."""
        self.recording = True
        self._casts, self._rehearsed, self._updates = {}, {}, {}
        self._table.zero_()
        self._sums.zero_()
        for (_, scales, products), rows in zip(self._summed, self._sums, strict=True):
            scales.sums["record"] = dict(zip(products, rows, strict=False))
        statistics = self.training.grad_sync.statistics
        counted = statistics.active
        statistics.watch(True, record=True)
        tallies = iter(self._table)
        for name, scales, rows in self.watched:
            for row, tensor in rows.items():
                tally = self._casts[name, tensor] = next(tallies)
                scales.watches[row] = functools.partial(tally_operand_, tally)
        try:
            self._weights()
            yield
        finally:
            self.recording = False
            statistics.watch(counted)
            for _, scales, _ in self.watched:
                scales.watches.clear()
                scales.sums.pop("record", None)
        sync = self.training.grad_sync
        for p, sent, mean in zip(sync.scaled_params(), *sync.statistics.tallies, strict=True):
            self._casts[self.names[p], "grad"] = sent
            if sync.peers.ranks > 1:
                self._casts[self.names[p], "grad_reduced"] = mean
        flag = self.training.optimizer.skipped()
        casts, rehearsed, updates, mu, sums = self._read()
        skipped = bool(flag)
        gathered = self._gather(casts, rehearsed, updates, mu, skipped, sums)
        experts = {
            str(layer): {name: [*map(_short, x.tolist())] if x.dim() else _short(float(x)) for name, x in numbers.items()}
            for layer, numbers in self.training.experts.by_layer().items()
        }
        curves = None
        if gathered is not None:
            written = line(iteration, skipped, *gathered, self.training.grad_sync.exchange.sums_in_fp32)
            raised = {} if self.training.guard is None else {"raised": {name: asdict(s) for name, s in self.training.guard.raised.items()}}
            curves = self._write(written | ({"experts": experts} if experts else {}) | raised)
        self.scalars(curves, iteration)

    @torch.no_grad()
    def _weights(self) -> None:
        """Measure how GEMMs will cast weights that are stored in a wider format; the same on data-parallel ranks."""
        self.training.optimizer.wait()
        for name, layer in self.layers:
            weight, fmt = layer.weight, layer.scaling.gemm.weight.format
            assert isinstance(weight, ScalingTensor)
            if weight.format != fmt and self.training.grid.counts(weight, every_copy=False):
                values, operand = LayerGemm.of(layer.scaling, weight).weight_cast(weight)
                row = self._casts[name, "weight"] = self._table.new_zeros(len(TALLY))
                tally_operand_(row, values, operand.codes, operand.element_scale_inv)

    def before_update(self) -> None:
        """Measure the next update, after gradient averaging. Collective."""
        if not self.recording or self.training.iteration < self._first:
            return
        for part in rehearse(self.training.optimizer):
            p = part.holding.param
            if not self.training.grid.counts(p, every_copy=self.training.grad_sync.shard):
                continue
            name = self.names[p]
            for tensor, stored in part.stored.items():
                if tensor in part.rounded:
                    row = self._rehearsed.setdefault((name, tensor), self._table.new_zeros(len(TALLY)))
                    ops.tally_(row, part.wanted[tensor], *self._payload(stored))
            row = self._updates.setdefault(name, self._table.new_zeros(len(UPDATE_SUMS)))
            ops.tally_update_(row, part.before, part.wanted[MASTER.column], *self._payload(part.stored[MASTER.column]))

    def _payload(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        return (stored.payload, stored.scale_inv) if isinstance(stored, ScalingTensor) else (stored, self._one)

    def _read(self) -> tuple[Rows, Rows, Rows, dict[str, float], Rows]:
        """Read all device results in one transfer: casts, casts of the update on copies, updates, mu, sums."""
        sync = self.training.grad_sync
        sums = {
            (name, what): row
            for (name, _, products), rows in zip(self._summed, self._sums, strict=True)
            for what, row in zip(products, rows, strict=False)
        }
        groups: tuple[dict[Any, Tensor], ...] = (self._casts, self._rehearsed, self._updates, sums)
        rows = [self._table.new_zeros(0), *(row for group in groups for row in group.values())]
        mu = [] if sync.autoscale is None else [sync.autoscale.mu.double()]
        numbers = iter(torch.cat([*rows, *mu]).tolist())
        casts, rehearsed, updates, summed = (
            {key: list(itertools.islice(numbers, len(row))) for key, row in group.items()} for group in groups
        )
        return casts, rehearsed, updates, dict(zip((self.names[p] for p in sync.scaled_params()), numbers, strict=bool(mu))), summed

    def _gather(
        self, casts: Rows, rehearsed: Rows, updates: Rows, mu: dict[str, float], skipped: bool, sums: Rows
    ) -> tuple[Rows, Rows, dict[str, float], Rows] | None:
        """Return the sums of all ranks, without a skipped update, on rank 0; None on others. Collective."""
        own = (casts, {}, mu, sums) if skipped else (casts | rehearsed, updates, mu, sums)
        ranks = torch.distributed.get_world_size()
        if ranks == 1:
            return _summed([own])
        everything: list[Any] | None = [None] * ranks if torch.distributed.get_rank() == 0 else None
        torch.distributed.gather_object(own, everything)
        return None if everything is None else _summed(everything)

    def _write(self, row: dict[str, Any]) -> dict[str, float]:
        """Append a line; return its summary as curves."""
        assert self._file is not None
        shrunk = {f"{layer} {what}": values[0] for layer, products in row["sums"].items() for what, values in products.items()}
        shrunk = {name: slope for name, slope in shrunk.items() if slope is not None and slope < SHRUNK}
        if shrunk and not self._warned:
            self._warned = True
            worst = min(shrunk, key=lambda name: shrunk[name])
            print(
                wrapped(
                    f"warning: sums of {len(shrunk)} FP8 products shrink in the tensor cores, most in {worst}, to {shrunk[worst]:.3f} of "
                    "the exact ones: accumulate in full with --fp8-fast-accumulation none"
                ),
                flush=True,
            )
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        return {f"precision/{name}": value for name, value in summary(row).items()}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _summed(everything: Sequence[tuple[Rows, Rows, dict[str, float], Rows]]) -> tuple[Rows, Rows, dict[str, float], Rows]:
    """Return the sums over ranks."""
    casts: Rows = {}
    updates: Rows = {}
    mu: dict[str, float] = {}
    sums: Rows = {}
    for their_casts, their_updates, their_mu, their_sums in everything:
        mu |= their_mu
        for key, tally in their_casts.items():
            if tally[0]:  # skip ranks that own nothing of the tensor
                casts[key] = add_tallies(casts[key], tally) if key in casts else tally
        for total, theirs in ((updates, their_updates), (sums, their_sums)):
            for name, row in theirs.items():
                total[name] = [a + b for a, b in zip(total.get(name, [0.0] * len(row)), row, strict=True)]
    return casts, updates, mu, sums


def line(
    iteration: int,
    skipped: bool,
    casts: Mapping[Key, Sequence[float]],
    updates: Mapping[str, Sequence[float]],
    mu: Mapping[str, float],
    sums: Mapping[Key, Sequence[float]],
    sums_in_fp32: bool,
) -> dict[str, Any]:
    """Return the line of a step (see `Recorder`) from its sums: tallies by layer and tensor, `UPDATE_SUMS` by parameter."""
    by_layer: dict[str, dict[str, list[float | int | None]]] = {}
    for (layer, tensor), tally in casts.items():
        verdict = judge(tally)
        scale = verdict.pop("scale")
        values: list[float | int | None] = [*map(_short, verdict.values()), round(math.log2(scale)) if 0 < scale < math.inf else None]
        if tensor == "grad_reduced" and not sums_in_fp32:  # no rank has the FP32 sum to compare with
            values[1] = values[3] = None
        by_layer.setdefault(layer, {})[tensor] = values
    by_product: dict[str, dict[str, list[float | None]]] = {}
    for (layer, product), tally in sums.items():
        if tally[0]:  # a layer in BF16 or with block scales has none
            by_product.setdefault(layer, {})[product] = [*map(_short, accumulation.judge_sums(tally))]
    total = [sum(column) for column in zip(*updates.values(), strict=True)]
    return {
        "iteration": iteration,
        "skipped": skipped,
        "columns": {"casts": CAST_COLUMNS, "sums": SUM_COLUMNS, "updates": UPDATE_COLUMNS},
        "casts": by_layer,
        "sums": by_product,
        "updates": {name: _judge_update(sums) for name, sums in updates.items()},
        "total": _judge_update(total) if total else None,
        "mu": {name: _short(value) for name, value in mu.items()},
    }


def summary(row: Mapping[str, Any]) -> dict[str, float]:
    """Summarize a line for TensorBoard: mean and worst over layers of underflow, saturation and SQNR, by kind of layer and tensor, and of
    slope and SQNR of sums, by product; mean and worst over parameters of the undelivered fraction of updates; and the total of the
    updates."""
    by_tensor: dict[tuple[str, str, str], list[float]] = {}
    measured = [(CAST_COLUMNS, *each) for each in row["casts"].items()] + [(SUM_COLUMNS, *each) for each in row["sums"].items()]
    for columns, layer, tensors in measured:
        kind = re.sub(r"^decoder\.layers\.\d+\.", "", layer)
        for tensor, values in tensors.items():
            for column, value in zip(columns, values, strict=True):
                if column in WORST and value is not None:
                    by_tensor.setdefault((kind, tensor, column), []).append(value)
    curves: dict[str, float] = {}
    for (kind, tensor, column), several in by_tensor.items():
        curves[f"{kind}/{tensor}/{column}"] = sum(several) / len(several)
        curves[f"{kind}/{tensor}/{column}_worst"] = WORST[column](several)
    undelivered = [values[UPDATE_COLUMNS.index("undelivered")] for values in row["updates"].values()]
    known = [share for share in undelivered if share is not None]
    if known:
        curves |= {"updates/undelivered": sum(known) / len(known), "updates/undelivered_worst": max(known)}
    total = dict(zip(UPDATE_COLUMNS, row["total"] or (), strict=False))
    return curves | {f"total/{column}": value for column, value in total.items() if value is not None}


def _judge_update(sums: Sequence[float]) -> list[float | None]:
    elements, squares, wanted, product, lost, distance, arrived = sums
    norm, share = math.sqrt(wanted), undelivered_share(distance, arrived)
    return [_short(math.sqrt(squares)), _short(norm), _short(product / norm if norm else 0.0), _short(lost / elements), _short(share)]


def _short(value: float) -> float | None:
    """Round to five digits; None for non-finite values, which JSON does not have."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
