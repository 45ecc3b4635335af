"""Measure the cost of a recorded step of `--record-precision` on one GPU, compared with the plain steps around it.

    python tools/bench/bench_recorder.py --level O3                   GPT-1.3B, micro-batch 4, as bench_step.py
    python tools/bench/bench_recorder.py --level O2 --preset 345m --micro-batch-size 8 --steps 20

Plain and recorded steps alternate, so that a graph recaptured after each recorded step would show up as slow plain steps. The first two
recorded steps, which compile kernels and capture graphs, are reported separately. A row is appended to --csv.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm.build import build_training
from megatron.lm.config import LoggingConfig
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file
from megatron.lm.step import train_step
from tools.bench import rows
from tools.bench.bench_step import WARM_UP, configuration, random_batches
from tools.precisions import legal_precision

INTERVAL = LoggingConfig.record_interval


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the row; needs `process_groups.initialize`."""
    config = configuration(options.level, options)
    training = build_training(config, options.vocab_size)
    device = process_groups.device()
    cuda = device.type == "cuda"
    batches, graphs = random_batches(config, options.vocab_size, device), step_graph.build(training)

    def timed(step: contextlib.AbstractContextManager[None]) -> float:
        start = time.perf_counter()
        with step:
            train_step(training, batches, graphs, recorder)
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "precision.jsonl"
        recorder = Recorder(training, str(file), options.record_interval, lambda *_: None)
        first = timed(recorder.step(1))  # as in the trainer, an eager step compiles what graphs need
        take_peak(cuda)
        for _ in range(options.warm_up):
            timed(contextlib.nullcontext())
        peak = take_peak(cuda)
        second = timed(recorder.step(training.iteration + 1))
        pairs = [(timed(contextlib.nullcontext()), timed(recorder.step(training.iteration + 1))) for _ in range(options.steps)]
        recorder.close()
        size = len(file.read_bytes().splitlines()[-1])
    plain, recorded = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "case": options.level,
        "preset": options.preset,
        "micro_batch": config.training.micro_batch_size,
        "params_m": round(sum(p.numel() for p in training.model.parameters()) / 1e6, 1),
        "ms": round(plain, 1),
        "recorded_ms": round(recorded, 1),
        "interval": options.record_interval,
        "share_percent": round(100 * (recorded - plain) / (options.record_interval * plain), 4),
        "first_ms": round(first, 1),
        "second_ms": round(second, 1),
        "graphs": graphs.captured if graphs is not None else 0,
        "peak_gib": peak,
        "recorded_peak_gib": take_peak(cuda),
        "line_kib": round(size / 1024, 1),
    }


def take_peak(cuda: bool) -> float | str:
    """Return the peak of allocated GiB since the last call; empty on a CPU."""
    if not cuda:
        return ""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def step_parser(description: str | None, *, steps: int, csv: str) -> Parser:
    """Return the parser of a benchmark of two alternating kinds of steps; `steps` is the default number of each, `csv` the file of
    results."""
    parser = Parser(description=description)
    parser.add_argument("--level", default="O3", type=legal_precision, help="level or precision (default: %(default)s)")
    parser.add_argument("--preset", default="1.3b", help="as in bench_step.py (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--vocab-size", type=count(1), default=50304)
    parser.add_argument("--warm-up", type=count(0), default=WARM_UP, help="plain steps that are not measured")
    parser.add_argument("--steps", type=count(1), default=steps, help="measured steps of each kind")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain")
    parser.add_argument("--csv", type=output_file, default=rows.ROOT / "tools/bench/results" / csv)
    parser.add_argument("--commit", help="hash to record if this tree is not a git checkout")
    return parser


def run(options: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    """Measure on one process, print the row and append it to the CSV."""
    process_groups.initialize(configuration(options.level, options))
    row = measure(options)
    print(json.dumps(row), flush=True)
    rows.append(options.csv, [rows.machine(options.commit) | row])
    return 0


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the row."""
    parser = step_parser(__doc__, steps=10, csv="recorder.csv")
    parser.add_argument(
        "--record-interval", type=count(1), default=INTERVAL, help="over which the extra time is spread (default: %(default)s)"
    )
    return run(parser.parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
