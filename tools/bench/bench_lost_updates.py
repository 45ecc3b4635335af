"""Measure the cost of the trainer's check for lost updates on one GPU: steps with and without a check.

    python tools/bench/bench_lost_updates.py --level O3                   GPT-1.3B, micro-batch 4, as bench_step.py
    python tools/bench/bench_lost_updates.py --level O2 --preset 125m --micro-batch-size 8 --flags=--cuda-graph=none

Plain and checked steps alternate. `share_percent` spreads the extra time of a checked step over the steps from check to check. The first
check compiles kernels and is reported separately. A row is appended to --csv.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.lm.build import build_training
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.lost_updates import EVERY, LostUpdates
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.shell import exit_codes
from megatron.lm.step import train_step
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from tools.bench.bench_recorder import run, step_parser, take_peak
from tools.bench.bench_step import configuration, random_batches


class Check:
    """A check at every step that receives it."""

    def __init__(self, watch: LostUpdates) -> None:
        self.watch = watch

    def due(self) -> bool:
        return True

    def before_update(self) -> None:
        self.watch.measure()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the row; needs `process_groups.initialize`."""
    config = configuration(options.level, options)
    training = build_training(config, options.vocab_size)
    device = process_groups.device()
    cuda = device.type == "cuda"
    batches, graphs = random_batches(config, options.vocab_size, device), step_graph.build(training)
    everyone = Peers(dist.group.WORLD, WireBytes())
    check = Check(LostUpdates(training, Metrics(config, options.vocab_size, training), everyone))

    def timed(watch: Check | None) -> float:
        start = time.perf_counter()
        train_step(training, batches, graphs, None, watch)
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    for _ in range(options.warm_up):
        timed(None)
    peak = take_peak(cuda)
    first = timed(check)
    pairs = [(timed(None), timed(check)) for _ in range(options.steps)]
    plain, checked = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "case": options.level,
        "preset": options.preset,
        "micro_batch": config.training.micro_batch_size,
        "params_m": round(sum(p.numel() for p in training.model.parameters()) / 1e6, 1),
        "ms": round(plain, 2),
        "checked_ms": round(checked, 2),
        "interval": EVERY,
        "share_percent": round(100 * (checked - plain) / (EVERY * plain), 4),
        "first_ms": round(first, 1),
        "graphs": graphs.captured if graphs is not None else 0,
        "peak_gib": peak,
        "checked_peak_gib": take_peak(cuda),
    }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the row."""
    parser = step_parser(__doc__, steps=20, csv="lost_updates.csv")
    return run(parser.parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
