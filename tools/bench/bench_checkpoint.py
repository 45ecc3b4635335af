"""Measure checkpoints of a GPT at O0 to O3: bytes on disk, time to save and load, and how much a background save slows training.

    python tools/bench/bench_checkpoint.py --folder /scratch             GPT-1.3B, micro-batch 4, sequence 2048

`bytes_param`: bytes on disk per parameter; O0 stores BF16 weights and FP32 masters and moments. `save_s`: how long training stops without
--async-save; `first_stall_s`, `stall_s`: with it, the first time (which pins host memory) and afterwards; `write_s`: until such a save is
published; `ms`, `ms_saving`: a step without and during a save. `load_s`: checksums, reading and copying into the model, from a page cache
that may contain the files. Measurements are appended to --csv.
"""

import argparse
import dataclasses
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm import checkpoint
from megatron.lm.build import build_training
from megatron.lm.config.presets import PRESETS
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.step import train_step
from tools.bench import bench_step, rows
from tools.precisions import legal_precision

COLUMNS = (
    "case",
    "preset",
    "params_m",
    "disk_gib",
    "bytes_param",
    "save_s",
    "first_stall_s",
    "stall_s",
    "write_s",
    "ms",
    "ms_saving",
    "load_s",
)


def _seconds(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(level: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one row; needs `process_groups.initialize`. The checkpoints stay in `folder`."""
    config = bench_step.configuration(level, options)
    places: dict[str, Any] = {"save": str(folder), "load": str(folder), "keep_last": 1, "async_save": True}
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **places))
    # There is no checkpoint yet that could determine the linear layers in FP8.
    fresh = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=None))
    training = build_training(fresh, options.vocab_size)
    batches = bench_step.random_batches(config, options.vocab_size, process_groups.device())
    graphs = step_graph.build(training)

    def step() -> float:
        return _seconds(lambda: train_step(training, batches, graphs))

    for _ in range(options.warm_up):
        step()
    times = [step() for _ in range(options.steps)]
    with checkpoint.Saver(training) as saver:
        first_stall = _seconds(saver.save)
        saver.finish()
        step()
        stall, began, during = _seconds(saver.save), time.perf_counter(), []
        while saver.busy:
            during.append(step())
        write = time.perf_counter() - began
    saving = _seconds(lambda: checkpoint.save(training, folder, keep_last=1))
    size = sum(file.stat().st_size for file in checkpoint.latest(folder).iterdir())
    training.config = config
    loading = _seconds(lambda: checkpoint.load(training))
    params = sum(p.numel() for p in training.model.parameters())
    return {
        "case": level,
        "preset": options.preset,
        "params_m": round(params / 1e6, 1),
        "disk_gib": round(size / 2**30, 3),
        "bytes_param": round(size / params, 3),
        "save_s": round(saving, 2),
        "first_stall_s": round(first_stall, 3),
        "stall_s": round(stall, 3),
        "write_s": round(write, 2),
        "ms": round(statistics.median(times) * 1e3, 1),
        "ms_saving": round(statistics.mean(during) * 1e3, 1) if during else "",
        "load_s": round(loading, 2),
    }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--levels", nargs="+", default=["O0", "O1", "O2", "O3"], type=legal_precision)
    parser.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--vocab-size", type=count(1), default=50304)
    parser.add_argument("--warm-up", type=count(0), default=bench_step.WARM_UP, help="steps that are not measured")
    parser.add_argument("--steps", type=count(1), default=10, help="measured steps without a save")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain")
    parser.add_argument("--folder", type=path, help="where to save; derived: the system's temporary folder")
    rows.add_flags(parser, "checkpoint.csv")
    options = parser.parse_args(argv)
    where = rows.machine(options.commit)
    process_groups.initialize(bench_step.configuration(options.levels[0], options))
    for level in options.levels:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            row = measure(level, options, folder)
        finally:
            shutil.rmtree(folder)
        print(json.dumps(row), flush=True)
        rows.append(options.csv, [where | row])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
