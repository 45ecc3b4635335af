"""Show where a training step spends its time on a GPU: the kernels of one step by kind, from torch's profiler.

    python tools/bench/profile_step.py --level O3                     GPT-1.3B, micro-batch 4
    python tools/bench/profile_step.py --level O2 --preset 7b --micro-batch-size 2 --csv profile.csv
    torchrun --nproc-per-node 2 tools/bench/profile_step.py --flags "--tensor-model-parallel-size 2 --sequence-parallel"

Of several processes, the first one reports its GPU. Prints the time of each kind and the longest kernels, and appends one row per kind to
--csv. "idle" is the time between the first and the last kernel of the step in which none ran: the cost of the host or of a dependency.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.lm.build import build_training
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from tools.bench import rows
from tools.bench.bench_step import WARM_UP, configuration, random_batches
from tools.precisions import legal_precision

# The first match determines the kind; our kernels are named after their files.
KINDS = (
    ("attention", ("fmha", "flash", "attention", "sdpa")),
    ("optimizer", ("adamw", "grad_stats", "square_sum")),
    ("loss", ("cross_entropy",)),
    ("norm", ("normalize", "layer_norm", "rms_norm", "gammabeta")),
    ("activation", ("activate", "gelu", "silu")),
    ("rotary", ("rotary",)),
    ("cast", ("cast", "transpose", "amax", "pack")),
    # cuBLAS names its operands by a letter: q is E4M3, r E5M2, t BF16.
    ("GEMM FP8", ("e4m3", "e5m2", "qgmma", "_qq", "_qr", "_rq")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "splitk", "xmma")),
    ("NCCL", ("nccl",)),
    ("memory", ("memcpy", "memset", "copy", "cat", "fill")),
)


def kind(name: str) -> str:
    """Return the kind of a kernel, from its name."""
    lower = name.lower()
    return next((label for label, words in KINDS if any(word in lower for word in words)), "other")


def kernels(options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Return (name, start, duration) in microseconds of every kernel of one step; needs `process_groups.initialize`."""
    training = build_training(configuration(options.level, options), options.vocab_size)
    batches = random_batches(training.config, options.vocab_size, process_groups.device())
    graphs = step_graph.build(training)
    for _ in range(options.warm_up):
        train_step(training, batches, graphs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train_step(training, batches, graphs)
        torch.cuda.synchronize()
    if graphs is not None:
        graphs.release()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]


def idle(kernels: Sequence[tuple[str, float, float]]) -> float:
    """Return the microseconds between the first start and the last end that no kernel covers."""
    gaps = end = 0.0
    for i, (_, start, duration) in enumerate(sorted(kernels, key=lambda kernel: kernel[1])):
        gaps += max(0.0, start - end) if i else 0.0
        end = max(end, start + duration)
    return gaps


def by_kind(kernels: Sequence[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Return one row per kind, the longest first: milliseconds and launches."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, _, duration in kernels:
        total[kind(name)][0] += duration / 1e3
        total[kind(name)][1] += 1
    listed = sorted(total.items(), key=lambda item: -item[1][0])
    return [{"kind": label, "ms": round(ms, 2), "launches": count} for label, (ms, count) in listed]


def longest(kernels: Sequence[tuple[str, float, float]], count: int) -> list[str]:
    """Return the kernels with the longest total time, one line each."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, _, duration in kernels:
        total[name][0] += duration / 1e3
        total[name][1] += 1
    listed = sorted(total.items(), key=lambda item: -item[1][0])[:count]
    return [f"{ms:9.2f} ms {calls:6d}  {kind(name):<10} {name[:90]}" for name, (ms, calls) in listed]


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Profile one step, print and append rows."""
    parser = Parser(description=__doc__)
    parser.add_argument("--level", default="O3", type=legal_precision)
    parser.add_argument("--preset", default="1.3b")
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--vocab-size", type=count(1), default=50304)
    parser.add_argument("--warm-up", type=count(0), default=WARM_UP)
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain")
    parser.add_argument("--top", type=count(1), default=25, help="kernels listed by name")
    rows.add_flags(parser, None, help="append one row per kind to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; a profile of kernels needs one")
    rank = process_groups.launch_from_environment().rank
    process_groups.initialize(configuration(options.level, options))
    try:
        measured = kernels(options)
    finally:
        process_groups.shutdown()
    if rank:
        return 0
    listed = [*by_kind(measured), {"kind": "idle", "ms": round(idle(measured) / 1e3, 2), "launches": ""}]
    print(*longest(measured, options.top), sep="\n")
    for row in listed:
        print(f"{row['ms']:9.2f} ms {row['launches']:>6}  {row['kind']}")
    if options.csv is not None:
        common = {"case": f"{options.level} {options.flags}".strip(), "preset": options.preset, "micro_batch": options.micro_batch_size}
        rows.append(options.csv, [rows.machine(options.commit) | common | row for row in listed])
    return 0


if __name__ == "__main__":
    sys.exit(main())
