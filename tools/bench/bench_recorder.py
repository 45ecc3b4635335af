"""Measure the cost of an observed step on one GPU, compared with the plain steps around it: of `--record-precision`, or of the trainer's
check for lost updates.

    python tools/bench/bench_recorder.py --level O3                   GPT-1.3B, micro-batch 4, as bench_step.py
    python tools/bench/bench_recorder.py --level O2 --preset 345m --micro-batch-size 8 --steps 20
    python tools/bench/bench_recorder.py --level O3 --check-lost-updates

Plain and observed steps alternate, so that a graph recaptured after each observed step would show up as slow plain steps. The first two
observed steps, which compile kernels and capture graphs, are reported separately. A row is appended to --csv.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.lm.build import build_training
from megatron.lm.config import LoggingConfig
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.run.reports import lost_updates
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from tools.bench import rows
from tools.bench.training_steps import WARM_UP, configuration, random_batches
from tools.precisions import legal_precision

INTERVAL = LoggingConfig.record_interval


class EveryStep:
    """The check for lost updates in each step that receives it, instead of every `lost_updates.EVERY` steps."""

    def __init__(self, watch: lost_updates.LostUpdates) -> None:
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
    cuda, checks = device.type == "cuda", options.check_lost_updates
    batches, graphs = random_batches(config, options.vocab_size, device), step_graph.build(training)
    everyone = Peers(dist.group.WORLD, WireBytes())
    check = EveryStep(lost_updates.LostUpdates(training, Metrics(config, options.vocab_size, training), everyone)) if checks else None
    interval = lost_updates.EVERY if checks else options.record_interval

    def timed(observed: bool) -> float:
        start = time.perf_counter()
        with recorder.step(training.iteration + 1) if observed and not checks else contextlib.nullcontext():
            train_step(training, batches, graphs, None if checks else recorder, [check] if check is not None and observed else [])
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "precision.jsonl"
        recorder = Recorder(training, str(file), options.record_interval, lambda *_: None)
        first = timed(True)  # as in the trainer, an eager step compiles what graphs need
        take_peak(cuda)
        for _ in range(options.warm_up):
            timed(False)
        peak = take_peak(cuda)
        second = timed(True)
        pairs = [(timed(False), timed(True)) for _ in range(options.steps)]
        recorder.close()
        size = "" if checks else round(len(file.read_bytes().splitlines()[-1]) / 1024, 1)
    plain, observed = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "case": options.level + ", check for lost updates" * checks,
        "preset": options.preset,
        "micro_batch": config.training.micro_batch_size,
        "params_m": round(sum(p.numel() for p in training.model.parameters()) / 1e6, 1),
        "ms": round(plain, 1),
        "recorded_ms": round(observed, 1),
        "interval": interval,
        "share_percent": round(100 * (observed - plain) / (interval * plain), 4),
        "first_ms": round(first, 1),
        "second_ms": round(second, 1),
        "graphs": graphs.captured if graphs is not None else 0,
        "peak_gib": peak,
        "recorded_peak_gib": take_peak(cuda),
        "line_kib": size,
    }


def take_peak(cuda: bool) -> float | str:
    """Return the peak of allocated GiB since the last call; empty on a CPU."""
    if not cuda:
        return ""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure on one process, print the row and append it to the CSV."""
    parser = Parser(description=__doc__)
    parser.add_argument("--level", default="O3", type=legal_precision, help="level or precision (default: %(default)s)")
    parser.add_argument("--preset", default="1.3b", help="as in bench_step.py (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--vocab-size", type=count(1), default=50304)
    parser.add_argument("--warm-up", type=count(0), default=WARM_UP, help="plain steps that are not measured")
    parser.add_argument("--steps", type=count(1), default=10, help="measured steps of each kind")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain")
    parser.add_argument("--check-lost-updates", action="store_true", help="time the check for lost updates, not a recorded step")
    parser.add_argument(
        "--record-interval", type=count(1), default=INTERVAL, help="over which the extra time is spread (default: %(default)s)"
    )
    rows.add_flags(parser, "recorder.csv")
    options = parser.parse_args(argv)
    process_groups.initialize(configuration(options.level, options))
    row = measure(options)
    print(json.dumps(row), flush=True)
    rows.append(options.csv, [rows.machine(options.commit) | row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
