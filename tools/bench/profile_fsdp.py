"""Show where a step of `bench_fsdp.py` spends its time: phases, kernels, operators, host functions and host synchronizations.

    torchrun --standalone --nproc-per-node 2 tools/bench/profile_fsdp.py --case O2
    torchrun --standalone --nproc-per-node 2 tools/bench/profile_fsdp.py --case bf16 --top 20

Rank 0 prints; its sections, in order:

1. Forward, backward, optimizer step and whole step in ms: when the host has issued each, and when the GPU has finished it. If both agree
   and the GPU has idle time, the host limits the step. Of a graph the forward is the whole step.
2. From a trace of two steps of the GPU alone: ms in which a kernel runs, in which only NCCL runs, in which nothing runs; launches; kernels
   by kind and by name.
3. From a trace with the host: operators by count and by own time. The profiler slows them, so compare them with each other only.
4. From Python's profiler, with the backward on the main thread: functions by own time and by total time. Without CUDA only this and the
   phases are printed.
5. Where the host waits for the GPU.
"""

import argparse
import cProfile
import io
import itertools
import json
import pstats
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from megatron.lm.shell.arguments import Parser, count
from msamp.integrations.fsdp_graph import GraphedStep
from tools.bench import bench_fsdp
from tools.bench.bench_data_parallel import covered, device_intervals
from tools.bench.profile_step import by_kind, longest

PHASES = ("forward", "backward", "optimizer step", "whole step")
TRACED_STEPS = 2


class Steps:
    """The training steps of one case, with a mark after each phase.

    Args:
        text: a case of `bench_fsdp.py`.
        options: its parsed arguments.
        device: of this rank.
    """

    def __init__(self, text: str, options: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.model, optimizer, self.update = bench_fsdp.build(text, options, device)
        captured = "graph" in text.split()
        self.graphed = GraphedStep(self.model, optimizer, self.forward_backward, self.update) if captured else None
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(options.vocab_size, (options.micro_batch_size, options.seq_length), generator=generator).to(device)

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run forward and backward; return the loss."""
        loss = self.model(tokens)
        loss.backward()
        return loss

    def __call__(self, mark: Callable[[], None] = lambda: None) -> None:
        mark()
        if self.graphed is not None:
            self.graphed(self.tokens)
            for _ in PHASES[1:]:
                mark()
            return
        loss = self.model(self.tokens)
        mark()
        loss.backward()
        mark()
        self.update()
        self.model.zero_grad()
        mark()

    def settle(self) -> None:
        """Wait for the GPU, and for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def phases(step: Steps, steps: int) -> dict[str, tuple[float, float]]:
    """Return phase -> median ms in which the host issued it, and in which the device ran it (the same without CUDA)."""
    hosts: list[list[float]] = []
    devices: list[list[float]] = []
    events: list[list[torch.cuda.Event]] = []
    step.settle()
    for _ in range(steps):
        times: list[float] = []
        marks: list[torch.cuda.Event] = []

        def mark(times: list[float] = times, marks: list[torch.cuda.Event] = marks) -> None:
            times.append(time.perf_counter() * 1e3)
            if step.device.type == "cuda":
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()

        step(mark)
        hosts.append(_spans([t - times[0] for t in times]))
        events.append(marks)
    step.settle()
    for marks in events:
        if marks:
            devices.append(_spans([marks[0].elapsed_time(mark) for mark in marks]))
    return {
        name: (statistics.median(row[i] for row in hosts), statistics.median(row[i] for row in devices or hosts))
        for i, name in enumerate(PHASES)
    }


def _spans(ends: Sequence[float]) -> list[float]:
    """Return the length of each phase and of the whole, from the time at each boundary, beginning with 0."""
    return [after - before for before, after in itertools.pairwise(ends)] + [ends[-1]]


def device_trace(step: Steps, top: int) -> list[str]:
    """Return what the GPU did in `TRACED_STEPS` steps, per step: busy, exposed and idle ms, kernels by kind, kernels by name."""
    step.settle()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED_STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    communication, compute = device_intervals(trace)
    everything = sorted([*communication, *compute])
    whole = max(end for _, end in everything) - everything[0][0]
    busy, computing = covered(everything), covered(compute)
    whole, busy, computing = (ms / TRACED_STEPS for ms in (whole, busy, computing))
    summary = (
        f"per step: {whole:.1f} ms, of which a kernel runs in {busy:.1f}, other than NCCL in {computing:.1f}; idle {whole - busy:.1f}; "
        f"{len(everything) / TRACED_STEPS:.0f} launches"
    )
    kernels = [
        (event["name"], float(event["ts"]), float(event["dur"]) / TRACED_STEPS)
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    lines = [f"{row['ms']:9.2f} ms {row['launches']:6d}  {row['kind']} (launches of {TRACED_STEPS} steps)" for row in by_kind(kernels)]
    return [summary, *lines, *longest(kernels, top)]


def operators(step: Steps, top: int) -> list[str]:
    """Return the operators and driver calls of one step by count and by own host time."""
    step.settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    table = profiler.key_averages()
    by_time = sorted(table, key=lambda row: -row.self_cpu_time_total)[:top]
    by_count = sorted(table, key=lambda row: -row.count)[:top]
    return [
        "by own host time:",
        *(f"{row.self_cpu_time_total / 1e3:9.2f} ms {row.count:6d}  {row.key[:100]}" for row in by_time),
        "by count:",
        *(f"{row.self_cpu_time_total / 1e3:9.2f} ms {row.count:6d}  {row.key[:100]}" for row in by_count),
    ]


def host_functions(step: Steps, steps: int, top: int) -> str:
    """Return Python's profile of some steps, by own and by total time, with the backward on this thread."""
    step.settle()
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    step.settle()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats(top)
    stats.sort_stats("cumtime").print_stats(top)
    return text.getvalue()


def synchronizations(step: Steps) -> list[str]:
    """Return the lines that make the host wait for the GPU in one step, with how often."""
    step.settle()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{seen.filename}:{seen.lineno} {str(seen.message)[:80]}" for seen in caught if "synchronizing CUDA operation" in str(seen.message)
    )
    return [f"{times:6d}  {place}" for place, times in places.most_common()] or ["none"]


def main(argv: Sequence[str] | None = None) -> int:
    """Profile one case on every rank; rank 0 prints."""
    flags = Parser(description=__doc__)
    flags.add_argument("--case", type=bench_fsdp.case, default="O2")
    flags.add_argument("--top", type=count(1), default=40, help="lines per table")
    bench_fsdp.add_model_flags(flags, warm_up=20, steps=12)  # after 16 steps the casts use delayed scales
    options = flags.parse_args(argv)
    device = bench_fsdp.start()
    gpu = device.type == "cuda"
    step = Steps(options.case, options, device)
    for _ in range(options.warm_up):
        step()
    lines = [
        f"{options.case}, {dist.get_world_size()} ranks, torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"{torch.cuda.get_device_name() if gpu else 'CPU'}; FSDPModule has "
        + ", ".join(name for name in ("set_custom_all_gather", "set_custom_reduce_scatter") if hasattr(FSDPModule, name))
    ]
    for name, (host, device_ms) in phases(step, options.steps).items():
        lines.append(f"{name:>15}: issued in {host:7.1f} ms, run in {device_ms:7.1f} ms")
    if gpu:
        lines += ["-- GPU", *device_trace(step, options.top)]
        lines += ["-- operators, one step under the profiler", *operators(step, options.top)]
        lines += ["-- host waits for the GPU", *synchronizations(step)]
    lines += [f"-- Python, {TRACED_STEPS} steps", host_functions(step, TRACED_STEPS, options.top)]
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)
    if step.graphed is not None:
        step.graphed.release()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
