"""Profiles of training steps (`--profile`) and the history of GPU memory (`--record-memory-history`).

`--profile-step-start S --profile-step-end E` profiles the iterations S + 1 to E of the whole run, on `--profile-ranks`. With
`--use-pytorch-profiler` torch.profiler writes a trace to `--tensorboard-dir`, for TensorBoard's plugin or Perfetto. Without it the
iterations are between cudaProfilerStart and cudaProfilerStop, with NVTX ranges, for

    nsys profile -s none -t nvtx,cuda --capture-range=cudaProfilerApi --capture-range-end=stop -o FILE msamp pretrain ...

A run that ends earlier writes what it has. A run that fails writes no trace, because that waits for the device, but its memory snapshot.
"""

import contextlib
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.lm.config import ProfilingConfig
from megatron.lm.shell.files import written_aside
from megatron.lm.shell.logs import Unwritten

HISTORY_ENTRIES = 100_000  # allocations and frees, with their stacks


class _Nsys:
    """nsys, controlled through the CUDA profiler API."""

    def __init__(self) -> None:
        self._nvtx = contextlib.ExitStack()

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        self._nvtx.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def step(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        torch.cuda.synchronize()
        self._nvtx.close()
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
        print("profile: the range for nsys ended", flush=True)


def _traced(warmup: int, active: int, write: Callable[[torch.profiler.profile], None]) -> torch.profiler.profile:
    """Return torch's profiler of some iterations; `write` gets it at their end.

    Args:
        warmup: iterations, 0 or 1, before those that are recorded; the first one under a profiler is slow.
        active: iterations to record.
        write: writes the trace.
    """
    # CUPTI must not be shut down while CUDA graphs exist; torch knows only of those that inductor captures.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without warm-up the profile is skewed; it begins with the process's first iteration
        schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True, with_stack=True)


class Profiles:
    """Profile and memory history of a run, on this rank.

    Raises:
        ValueError: if nsys or the memory history is requested without a GPU.
    """

    def __init__(self, settings: ProfilingConfig, folder: Path, iterations: int, unwritten: Unwritten) -> None:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.settings, self.rank, self._iterations, self._unwritten = settings, rank, iterations, unwritten
        self._folder = folder
        self._profiler: _Nsys | torch.profiler.profile | None = None
        self._first = self._last = 0
        self._waiting = settings.profile and rank in settings.profile_ranks
        self._remembers = settings.record_memory_history and rank == ranks - 1
        if not torch.cuda.is_available():
            if settings.profile and not settings.use_pytorch_profiler:
                raise ValueError("--profile drives nsys, which profiles GPUs, and there is none: add --use-pytorch-profiler")
            if settings.record_memory_history:
                raise ValueError("--record-memory-history records a GPU's memory, and there is none: drop it")

    def begin(self, iteration: int) -> None:
        """Start the memory history, before the step after `iteration`; say so if the profile's iterations are not part of this run."""
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
        start, end = self.settings.profile_step_start, self.settings.profile_step_end
        if self._waiting and (iteration >= end or start >= self._iterations):
            self._waiting = False
            print(f"--profile: nothing is profiled, since this start trains iterations {iteration + 1} to {self._iterations}, and the "
                  f"profile is of {start + 1} to {end}", flush=True)  # fmt: skip

    def before(self, iteration: int) -> None:
        """Start the profiler if this iteration, which is about to run, is the first one of the profile or the one before it; note the
        beginning of later ones."""
        if self._profiler is not None:
            self._profiler.step()
        start, end = self.settings.profile_step_start, self.settings.profile_step_end
        traced = self.settings.use_pytorch_profiler
        if not self._waiting or not start + (not traced) <= iteration <= end:
            return
        self._waiting = False
        warmup = int(iteration == start)
        self._first, self._last = iteration + warmup, iteration
        self._profiler = _traced(warmup, end - self._first + 1, self._write) if traced else _Nsys()
        self._profiler.start()

    def after(self, iteration: int) -> None:
        """End the profile after its last iteration."""
        if self._profiler is None:
            return
        self._last = iteration
        if iteration >= self.settings.profile_step_end:
            self._stop()

    def report(self, iteration: int) -> None:
        """Write the memory snapshot, at `--log-interval`."""
        if self._remembers:
            path = Path(self.settings.memory_snapshot_path)
            with self._unwritten.endured(f"--memory-snapshot-path {path}"), written_aside(path) as stream:
                pickle.dump(torch.cuda.memory._snapshot(), stream)

    def close(self, *, failed: bool = False) -> None:
        """End a profile that is still running, and the memory history. May be called twice."""
        if self._profiler is not None and not failed:
            if self._last < self._first:
                print(f"--profile: nothing is profiled, since the run ends after iteration {self._last}", flush=True)
            self._stop()
        self._profiler = None
        if self._remembers:
            self.report(self._last)
            print(f"memory snapshot, rank {self.rank}: {self.settings.memory_snapshot_path}", flush=True)
            torch.cuda.memory._record_memory_history(enabled=None)
            self._remembers = False

    def _stop(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        name = f"rank-{self.rank}.iterations-{self._first}-{self._last}.pt.trace.json.gz"
        with self._unwritten.endured(f"--tensorboard-dir {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:  # torch would write through a link at the name
                profile.export_chrome_trace(os.path.join(scratch, name))
                os.replace(os.path.join(scratch, name), self._folder / name)
            print(f"profile of iterations {self._first} to {self._last}, rank {self.rank}: {self._folder / name}", flush=True)
