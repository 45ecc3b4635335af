"""Metrics of a run: the log line, TensorBoard, Weights & Biases and the metrics file (one JSON object per line)."""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron.lm.config import LoggingConfig
from megatron.lm.config.sections.batch_sizes import BatchSizes
from megatron.lm.processes.process_groups import device
from megatron.lm.run.reports.log_line import evaluation_line, megatron_line, train_line, wrapped
from megatron.lm.run.reports.weights_and_biases import WandbRun, logs_here
from megatron.lm.shell.logs import EventFile, LogFile, Unwritten, cut_after
from megatron.lm.training.state import StepResult, Training
from msamp.comm.counters import KINDS
from msamp.nn.precision_guard import Change, LayerGuard

# Dense peaks in TFLOP/s at compute capability 9.0 (H100 and H200 SXM data sheet). The papers divide BF16 runs by the first and FP8 runs by
# the second. Neither is enough: FP8 can exceed 100 % of the first, and a BF16 run cannot reach half of the second.
HOPPER_PEAKS = {"bf16": 989.0, "fp8": 1979.0}


def peak_tflops(logging: LoggingConfig) -> dict[str, float]:
    """Return the peaks that count as 100 % MFU, in TFLOP/s by name: `bf16` and `fp8` on a Hopper GPU for any precision; `given` with
    `--peak-tflops`; empty if no peak is known."""
    if logging.peak_tflops is not None:
        return {"given": logging.peak_tflops}
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return dict(HOPPER_PEAKS) if hopper else {}


def mfu(tflops: float, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the model FLOPs utilization for each peak, named `mfu_bf16_peak`, `mfu_fp8_peak` or `mfu_given_peak`."""
    return {f"mfu_{name}_peak": tflops / peak for name, peak in peaks.items()}


def memory_gib() -> float:
    """Return this process's peak of allocated GPU memory, or its current resident memory on a CPU, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30


def least_and_most(value: float) -> tuple[float, float]:
    """Return minimum and maximum of the ranks' values; collective."""
    values = torch.tensor([-value, value], dtype=torch.float64, device=device())
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return -float(values[0]), float(values[1])


def _finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Collects steps and reports them per interval. Rank 0 writes, and the last rank logs to Weights & Biases (`--wandb-project`) the same
    numbers, except that times and sent bytes are its own. The other ranks only contribute to sums.

    Args:
        logging: where and how often to report.
        training: the training state, for the remaining time and the count of skipped steps.
        batch_sizes: sequences of each iteration.
        iterations: of the whole run.
        seq_length: tokens of a sequence.
        flops_per_token: of the model, from `presets.flops_per_token`.

    Attributes:
        unwritten: counts failed writes.
        measurements: called at a report on every rank, in this order; each returns more numbers of the last step.
        failed: whether the run ended by an error, as Weights & Biases will show.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        training: Training,
        batch_sizes: BatchSizes,
        *,
        iterations: int,
        seq_length: int,
        flops_per_token: float,
    ) -> None:
        self.logging = logging
        self.world_size = torch.distributed.get_world_size()
        self.main = torch.distributed.get_rank() == 0
        self.batch_sizes, self.iterations = batch_sizes, iterations
        self.seq_length, self.flops_per_token = seq_length, flops_per_token
        self.peaks = peak_tflops(logging)
        self.start_iteration, self.start_time = training.iteration, time.perf_counter()
        self.skipped = training.optimizer.skipped_steps
        self.grad_sync = training.grad_sync
        self.unwritten = Unwritten()
        self.events: EventFile | None = None
        self.file: LogFile | None = None
        self.wandb: WandbRun | None = None
        self.failed = False
        self.measurements: list[Callable[[], dict[str, float]]] = []
        self._begin_interval()

    def open(self, again: int = 0) -> None:
        """Open the files, on rank 0.

        Args:
            again: remove entries after this iteration, because a resumed run repeats them; 0 keeps everything.

        Raises:
            OSError: if one cannot be opened.
        """
        logging = self.logging
        if self.main and logging.metrics_file:
            path = Path(logging.metrics_file)
            if again:
                cut_after(path, again)
            self.file = LogFile(path, f"--metrics-file {path}", self.unwritten)
        if self.main and logging.tensorboard_dir:
            self.events = EventFile(Path(logging.tensorboard_dir), again + 1 if again else None, self.unwritten)

    def open_wandb(self, folder: str, flags: Mapping[str, Any], run_id: str) -> None:
        """Start the run of Weights & Biases, on the rank that logs to it; arguments as for `WandbRun`.

        Raises:
            ValueError: if it cannot start.
        """
        if logs_here(self.logging):
            self.wandb = WandbRun(self.logging, folder, flags, run_id, self.unwritten)

    def guard_changes(self, guard: LayerGuard | None, changes: Sequence[Change]) -> None:
        """Print each change of `--fp8-guard` on rank 0, and write it as an entry of kind "fp8_guard": the iteration after which it applies,
        the layer, `raised`, `why`, for a return the number of `steps` in BF16, and how many `layers_in_bf16` there are then."""
        for change in changes:
            assert guard is not None
            entry = {"kind": "fp8_guard", "iteration": change.step, "layers_in_bf16": len(guard.raised)}
            self.write(entry | {"layer": change.layer, "raised": change.raised, "why": change.why, "steps": change.steps})
            if self.main:
                print(wrapped(f"iteration {change.step}, --fp8-guard: {change}"), flush=True)

    def tokens(self, iteration: int) -> int:
        """Return the tokens of all iterations up to this one."""
        return self.batch_sizes.consumed(iteration) * self.seq_length

    @property
    def _writes(self) -> bool:
        return self.main or self.wandb is not None

    def _begin_interval(self) -> None:
        self.steps: list[StepResult] = []
        self.interval_start = time.perf_counter()
        self.paused = 0.0  # seconds of evaluation, saving and others that the throughput leaves out

    def record(self, step: StepResult, iteration: int) -> None:
        """Record one step; report at the end of the interval."""
        self.steps.append(step)
        if self.reports(iteration):
            self.report(iteration)

    def reports(self, iteration: int) -> bool:
        """Return whether an interval ends with this iteration."""
        return iteration % self.logging.log_interval == 0 or iteration == self.iterations

    def report(self, iteration: int) -> None:
        """Report the steps since the last report, if there are any; collective."""
        if self.steps:
            self._report(iteration)
            self._begin_interval()

    def _report(self, iteration: int) -> None:
        # One collective and one host sync per interval: the sums and flags of the steps are on the device.
        skipped = sum(bool(step.skipped) for step in self.steps)
        self.skipped += skipped
        sums = torch.stack([torch.stack([s.loss_sum, s.tokens]) for s in self.steps]).double().sum(0)
        torch.distributed.all_reduce(sums)  # tensor-parallel ranks have the same values, so the ratio is unchanged
        loss = float(sums[0] / sums[1])
        seconds = (time.perf_counter() - self.interval_start - self.paused) / len(self.steps)
        memory = least_and_most(memory_gib())
        communication = self._communication()
        measured = {name: value for measurement in self.measurements for name, value in measurement().items()}
        if not self._writes:
            return
        tokens = self.tokens(iteration)
        tokens_per_s = (tokens - self.tokens(iteration - len(self.steps))) / len(self.steps) / seconds
        tflops = tokens_per_s * self.flops_per_token / 1e12 / self.world_size
        left = (time.perf_counter() - self.start_time) / (iteration - self.start_iteration) * (self.iterations - iteration)
        last = self.steps[-1]
        row: dict[str, Any] = {
            "kind": "train",
            "iteration": iteration,
            "tokens": tokens,
            "loss": loss,
            "lr": last.lr,
            **({} if last.loss_scale is None else {"loss_scale": float(last.loss_scale.values())}),
            "grad_norm": float(last.grad_norm),
            **measured,
            "skipped": self.skipped,
            **({} if last.eager is None else {"eager_steps": sum(bool(step.eager) for step in self.steps)}),
            "step_ms": seconds * 1e3,
            "tokens_per_s": tokens_per_s,
            "tflops": tflops,
            **mfu(tflops, self.peaks),
            "memory_gib": memory[1],
            "memory_gib_min": memory[0],
            **communication,
        }
        self.write(row)
        if self.main:
            with self.unwritten.endured("stdout"):
                samples, before = (self.batch_sizes.consumed(number) for number in (iteration, iteration - 1))
                theirs = megatron_line(row, self.iterations, samples, samples - before, skipped)
                print(theirs if self.logging.megatron_log else train_line(row, self.iterations, left), flush=True)

    def _communication(self) -> dict[str, Any]:
        """Return the bytes that this rank sent per step, by kind and collective, and the last step's gradient statistics; collective."""
        sync, steps = self.grad_sync, len(self.steps)
        sent = sync.sent.take()
        row: dict[str, Any] = {
            f"sent_{kind}_mib": sum(size for (k, _), size in sent.items() if k == kind) / steps / 2**20 for kind in KINDS
        }
        row["sent_bytes"] = {f"{kind} {collective}": size / steps for (kind, collective), size in sorted(sent.items())}
        if sync.statistics.numel and sync.statistics.active:
            row |= sync.statistics.shares(sync.peers)
        if sync.autoscale is not None and sync.autoscale.mu.numel():  # empty if every linear layer is BF16
            row |= {"mu_min": float(sync.autoscale.mu.min()), "mu_max": float(sync.autoscale.mu.max())}
        return row

    def evaluation(self, kind: str, iteration: int, loss: float, bits_per_byte: float | None) -> None:
        """Report the loss (nats per token) of the `valid` or `test` split."""
        if not self._writes:
            return
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        tokens = self.tokens(iteration)
        row = {"kind": kind, "iteration": iteration, "tokens": tokens, "loss": loss, "ppl": perplexity, "bits_per_byte": bits_per_byte}
        self.write(row)
        if self.main:
            with self.unwritten.endured("stdout"):
                print(evaluation_line(row, self.logging.megatron_log), flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """Write an object to the metrics file, and its numbers to TensorBoard and Weights & Biases under kind/name; do nothing on ranks
        that do not write."""
        if self.file is not None:
            self.file.write(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")
        if "iteration" in row:
            values = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "iteration"}
            self.scalars({f"{row['kind']}/{key}": value for key, value in values.items()}, row["iteration"])

    def begin(self, row: dict[str, Any]) -> None:
        """Write the first entry of this start: `row`, the iterations from and to which it trains, and the process that writes."""
        process = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        self.write(row | {"start": self.start_iteration, "iterations": self.iterations} | process)

    def end(self, iteration: int, status: str, why: str | None = None) -> None:
        """Write the last entry of this start, by which a reader of the metrics file tells an end from a kill.

        Args:
            iteration: the last one.
            status: "completed", "stopped" before the last iteration, or "failed".
            why: the reason, in one line.
        """
        if self.file is not None:
            row = {"kind": "end", "iteration": iteration, "status": status, "why": why}
            self.file.write(json.dumps(row).encode() + b"\n")

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Write numbers only to TensorBoard and Weights & Biases, by their full name; do nothing on ranks that do not write."""
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, iteration)
        if self.wandb is not None:
            self.wandb.log(values, iteration)

    def scalars_from_rank_0(self, values: Mapping[str, float] | None, iteration: int) -> None:
        """Write numbers that only rank 0 has (None on other ranks) by `scalars`. Collective."""
        box = [values]
        if self.logging.wandb_project is not None and self.world_size > 1:
            torch.distributed.broadcast_object_list(box, 0)
        if box[0] is not None:
            self.scalars(box[0], iteration)

    def close(self) -> None:
        """Close the files and the run of Weights & Biases, and print failed writes."""
        if self.wandb is not None:
            self.wandb.close(failed=self.failed)
        for file in (self.file, self.events):
            if file is not None:
                file.close()
        self.unwritten.print_failed()
