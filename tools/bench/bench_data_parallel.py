"""Measure time, memory, communication volume and exposed communication of GPT training steps, data-parallel over the GPUs of one host.

    torchrun --nproc-per-node 2 tools/bench/bench_data_parallel.py              GPT-1.3B at O0 with ZeRO, O1, O2 and O3
    torchrun --nproc-per-node 2 tools/bench/bench_data_parallel.py --cases O3 "O2 --use-distributed-optimizer" "O3 --grad-exchange nccl"
    NCCL_P2P_DISABLE=1 torchrun ...                                             without the link between GPUs, like a slow network
    ... --peer 'torchrun --standalone --nproc-per-node 2 bench_megatron.py --cases bf16 --overlap'

A case is a level and further flags of megatron.lm.pretrain. Every rank has the same random tokens, so the loss equals one GPU's. There is
no host synchronization between steps, so that weights are gathered while the next forward runs. Baselines (--peer), as in bench_step.py,
run after our processes have left the GPUs; the memory that they print is their rank 0's and is recorded under `_max`. Measurements are
appended to --csv.

Columns: `ms` of rank 0; `_min`, `_max` over the ranks; `wire_mib`: weights and gradients that a rank sends per step, mean over the ranks;
`wire_bytes_param`: the same per parameter x N / (N - 1), which does not depend on the number N of ranks; `wire_linear_bytes_param`: the
same for the payloads of linear weights only; `exposed_ms` and `exposed_share` as `exposed_communication` defines them.
"""

import argparse
import functools
import gc
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.config.presets import PRESETS
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.metrics import least_and_most
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from megatron.lm.training.state import StepResult, Training
from msamp.comm.collectives import Peers
from msamp.comm.copies import links_disabled
from msamp.comm.grad_sync import GradSync
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.greedy_zero import ZeRO
from tools.bench import bench_step, rows

Step = Callable[[], StepResult]
COLUMNS = (
    "case",
    "level",
    "zero",
    "exchange",
    "preset",
    "micro_batch",
    "gpus",
    "p2p",
    "params_m",
    "ms_p20",
    "ms",
    "ms_p80",
    "tokens_s_gpu",
    "peak_gib_min",
    "peak_gib_max",
    "rest_gib_min",
    "rest_gib_max",
    "wire_mib",
    "wire_bytes_param",
    "wire_linear_bytes_param",
    "profiled_ms",
    "exposed_ms",
    "exposed_share",
    "no_comm_ms",
    "communication_share",
    "loss",
)
CASES = ("O0 --use-distributed-optimizer", "O1", "O2", "O3")
PROFILED_STEPS = 2
LEAVING_SECONDS = 10.0  # time for the other ranks' processes to end and free their GPUs

Interval = tuple[float, float]


def configuration(case: str, options: argparse.Namespace, ranks: int) -> Config:
    """Return the preset as the trainer would run a case on `ranks` processes; flags of the case override --flags."""
    level, *flags = shlex.split(case)
    batch = ["--global-batch-size", str(options.micro_batch_size * ranks)]
    flags = [*batch, *shlex.split(options.flags), *flags]
    return bench_step.configuration(level, argparse.Namespace(**vars(options) | {"flags": shlex.join(flags)}))


def wire_bytes_per_parameter(sync: GradSync, params: Collection[Tensor]) -> float:
    """Return the payload bytes per parameter and step, mean over `params`: what all ranks send together, divided by their number less 1.

    A gradient is sent to its owner; then the new weight is sent back under ZeRO, otherwise the averaged gradient. Scales, a few floats per
    tensor, are not counted.
    """
    total = 0
    for bucket in sync.buckets:
        for p in bucket.params:
            if p in params:
                back = (p.payload if isinstance(p, ScalingTensor) else p).element_size() if sync.shard else bucket.format.bytes
                total += p.numel() * (bucket.format.bytes + back)
    return total / sum(p.numel() for p in params)


def linear_weights(sync: GradSync) -> set[Tensor]:
    """Return the weights of the transformer layers' linear layers, at any level."""
    return {p for p, name in sync.names.items() if ".linear_" in name and p.dim() == 2}


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


class SilentPeers(Peers):
    """Ranks that send nothing: each uses its own data instead of the others', so that all other work is unchanged."""

    def all_reduce(self, x: Tensor, *_: Any) -> Tensor:
        return x

    def all_to_all(self, flat: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
        return flat.split(list(sizes))[self.rank].repeat(self.ranks, 1)

    def all_gather(self, own: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
        return own.repeat(-(-sum(sizes) // max(1, own.numel())))[: sum(sizes)]

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
        return flat.split(list(sizes))[self.rank].clone()


def without_communication(training: Training, step: Step, steps: int, ms: float) -> dict[str, float]:
    """Measure the step without its collectives, and the share of `ms`, the whole step, that they take; invalidates the weights.

    This is what a faster network could save: it excludes communication that overlaps compute or a slow host.
    """
    sync = training.grad_sync
    if sync.peers.ranks == 1:
        return {}
    sync.sender.peers = SilentPeers(sync.peers.group, sync.sent)
    if isinstance(training.optimizer.shard, ZeRO):
        training.optimizer.shard.gathers = False
    for _ in range(2):
        step()
    without_ms = rows.percentiles(step_times(step, steps)[0])[1] * 1e3
    return {"no_comm_ms": round(without_ms, 1), "communication_share": round(1 - without_ms / ms, 4)}


def measure(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row on this rank; collective; needs `process_groups.initialize`."""
    device, ranks = process_groups.device(), dist.get_world_size()
    training = build_training(config, options.vocab_size)
    sync = training.grad_sync
    batches = bench_step.random_batches(config, options.vocab_size, device)
    step = functools.partial(train_step, training, batches, step_graph.build(training))
    for number in range(options.warm_up):
        if number == 1 and device.type == "cuda":  # a replayed graph allocates nothing: its peak is the peak of the step that captured it
            torch.cuda.reset_peak_memory_stats()
        step()
    sync.sent.take()
    times, result = step_times(step, options.steps)
    loss = float(result.loss_sum / result.tokens)
    wire = torch.tensor(sync.sent.total("weight") / options.steps, dtype=torch.float64, device=device)
    columns = memory()
    dist.all_reduce(wire)
    low, median, high = rows.percentiles(times)
    params = sum(p.numel() for p in training.model.parameters())
    row: dict[str, Any] = {
        "zero": "on" if sync.shard else "off",
        "exchange": sync.exchange.name,
        "params_m": round(params / 1e6, 1),
        "ms_p20": round(low * 1e3, 1),
        "ms": round(median * 1e3, 1),
        "ms_p80": round(high * 1e3, 1),
        "tokens_s_gpu": round(config.global_batch_size(ranks) * config.model.seq_length / median / ranks),
        "wire_mib": round(float(wire) / ranks / 2**20, 3),
        "loss": round(loss, 4),
    }
    if ranks > 1:
        row["wire_bytes_param"] = round(float(wire) / (ranks - 1) / params, 4)
        row["wire_linear_bytes_param"] = round(wire_bytes_per_parameter(sync, linear_weights(sync)), 4)
    row |= columns | exposed_communication(step)
    return row | without_communication(training, step, options.steps, median * 1e3)


def step_times(step: Step, steps: int) -> tuple[list[float], StepResult]:
    """Return the seconds of each of `steps` steps on this rank, without a host synchronization between them, and the last result."""
    device = process_groups.device()
    marks = [_mark(device)]
    for _ in range(steps):
        result = step()
        marks.append(_mark(device))
    return [_seconds(*pair) for pair in itertools.pairwise(marks)], result


def _mark(device: torch.device) -> Any:
    """Return a mark of the current time on the compute stream, or on the clock without CUDA."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def memory() -> dict[str, float]:
    """Return the GiB allocated by torch, peak and between steps, of the ranks with the least and the most; empty without CUDA;
    collective."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    sizes = {"peak_gib": torch.cuda.max_memory_allocated(), "rest_gib": torch.cuda.memory_allocated()}
    columns = {}
    for name, size in sizes.items():
        for end, value in zip(("min", "max"), least_and_most(size / 2**30), strict=True):
            columns[f"{name}_{end}"] = round(value, 2)
    return columns


def parser(description: str | None, cases: Sequence[str], csv: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark over several processes, with results in the file `csv`; the caller adds `--warm-up`."""
    flags = Parser(description=description)
    flags.add_argument("--cases", nargs="*", default=cases, metavar="CASE", help='a level and flags, such as "O3 --grad-exchange nccl"')
    flags.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    flags.add_argument("--micro-batch-size", type=count(1), default=4)
    flags.add_argument("--vocab-size", type=count(1), default=50304)
    flags.add_argument("--steps", type=count(2), default=10, help="measured steps")
    flags.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain, for every case")
    flags.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="also measure a baseline; can be repeated")
    rows.add_flags(flags, csv)
    return flags


def peer_rows(commands: Sequence[str], processes: int) -> Iterator[dict[str, Any]]:
    """Yield the results of all baselines, after our other ranks have left the GPUs; their memory counts as the fullest rank's."""
    if commands and processes > 1 and torch.cuda.is_available():
        time.sleep(LEAVING_SECONDS)
    for row in itertools.chain.from_iterable(map(bench_step.peer_rows, commands)):
        yield {f"{key}_max": row[key] for key in ("peak_gib", "rest_gib") if key in row} | row


def link() -> str:
    """Return whether NCCL may use the link between GPUs, "on" or "off"."""
    return "off" if links_disabled() else "on"


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; rank 0 prints and appends the results, and runs the baselines after the others have left."""
    flags = parser(__doc__, CASES, "data_parallel.csv")
    flags.add_argument("--warm-up", type=count(0), default=bench_step.WARM_UP, help="steps that are not measured")
    options = flags.parse_args(argv)
    launch = process_groups.launch_from_environment()
    where = rows.machine(options.commit) if launch.rank == 0 else {}
    common = {"preset": options.preset, "micro_batch": options.micro_batch_size, "gpus": launch.world_size, "p2p": link()}

    def report(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(options.csv, [where | {column: row.get(column, "") for column in COLUMNS}])

    configs = {case: configuration(case, options, launch.world_size) for case in options.cases}
    if configs:
        process_groups.initialize(next(iter(configs.values())))
    for case, config in configs.items():
        row = common | {"case": case, "level": case.split()[0]} | measure(config, options)
        if launch.rank == 0:
            report(row)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    process_groups.shutdown()
    if launch.rank > 0:
        return 0
    for row in peer_rows(options.peer, launch.world_size):
        report(common | row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
