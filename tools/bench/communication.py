"""Measure the part of a training step that only communicates, under the profiler."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from megatron.lm.processes import process_groups
from tools.bench.training_steps import Step

PROFILED_STEPS = 2

Interval = tuple[float, float]


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals (start, end), in any order."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def exposed(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """Return the length covered by communication but not by compute; intervals in any order, overlapping or not."""
    return covered([*communication, *compute]) - covered(compute)


def device_intervals(trace: Mapping[str, Any]) -> tuple[list[Interval], list[Interval]]:
    """Return the GPU activity in a Chrome trace of torch.profiler: NCCL's kernels, and everything else including copies, each sorted, in
    ms.

    Selects by category, because a trace also repeats the host's annotations on the GPU's tracks, under names such as nccl:all_to_all.
    """
    communication: list[Interval] = []
    compute: list[Interval] = []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            interval = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            (communication if "nccl" in event["name"].lower() else compute).append(interval)
    return sorted(communication), sorted(compute)


def exposed_communication(step: Step) -> dict[str, float]:
    """Measure the time of this rank's step in which an NCCL kernel runs but no other kernel or copy; collective.

    This is an upper bound of the cost of communication: NCCL's kernels also spin while they wait for a slower rank, and an idle GPU may be
    waiting for its host.

    Returns:
        exposed_ms and profiled_ms (the whole step) per step under the profiler, and their ratio exposed_share; empty without CUDA, or if
        the profiler recorded no NCCL kernel.
    """
    device = process_groups.device()
    if device.type != "cuda":
        return {}
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], schedule=schedule) as profiler:
        step()
        torch.cuda.synchronize()
        profiler.step()
        dist.all_reduce(torch.zeros(1, device=device))  # the ranks start together, even if their profilers took different times
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
        ms = (time.perf_counter() - start) * 1e3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        communication, compute = device_intervals(json.loads(path.read_text(encoding="utf-8")))
    if not communication:
        return {}
    alone = exposed(communication[1:], compute)  # the first is the all-reduce above
    return {
        "profiled_ms": round(ms / PROFILED_STEPS, 1),
        "exposed_ms": round(alone / PROFILED_STEPS, 2),
        "exposed_share": round(alone / ms, 4),
    }
