"""Measure time and memory of whole training steps of a GPT at O0 to O3, or any precision, on one GPU, and of baselines in the same run.

    python tools/bench/bench_step.py                                  GPT-1.3B, micro-batch 4, sequence 2048, tied 50,304 tokens
    python tools/bench/bench_step.py --levels O0 O2 --preset 345m --micro-batch-size 8
    python tools/bench/bench_step.py --levels O3 "O3 --output-layer-precision fp8"    a level with its own flags
    python tools/bench/bench_step.py --preset llama3-8b --flags '--num-layers 8'       flags for every case
    python tools/bench/bench_step.py --levels O3 --flags '--record-precision r.jsonl --record-interval 1'    recorded steps
    python tools/bench/bench_step.py --levels O3 'O3 --fp8-guard --fp8-guard-interval 1'    steps that the guard measures
    python tools/bench/bench_step.py --levels O3 --as-stage --flags '--num-layers 12 --global-batch-size 32'
    python tools/bench/bench_step.py --peer 'python bench_megatron.py --cases bf16 te-delayed'

A step is forward, backward, clipping and update on random tokens. A baseline (--peer) is any command that prints one JSON
object per case with the keys case, ms, tokens_s_gpu, peak_gib (and others of COLUMNS). Measurements are appended to --csv: `case` is the
level with its flags, `preset` the preset with the flags of all cases.

--as-stage replays each micro-batch with the graphs of a pipeline stage (`megatron.lm.graphs.stage_graph`), without neighbours to send to,
to compare them with the graphs of a whole model.
"""

import argparse
import contextlib
import gc
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.lm.build import build_training
from megatron.lm.config import OPT_LEVELS, Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, flops_per_token
from megatron.lm.data.batch import own_part
from megatron.lm.graphs import capture, step_graph
from megatron.lm.graphs.stage_graph import StageGraphs
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import Grid
from megatron.lm.run.reports.metrics import mfu, peak_tflops
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from megatron.lm.training.fp8_guard import check_guard, guarded
from tools.bench import rows
from tools.precisions import case_flags, legal_case

COLUMNS = (
    "case",
    "preset",
    "micro_batch",
    "gpus",
    "params_m",
    "ms_p20",
    "ms",
    "ms_p80",
    "tokens_s_gpu",
    "tflops",
    "mfu_bf16_peak",
    "mfu_fp8_peak",
    "peak_gib",
    "rest_gib",
    "loss",
)
VOCABULARY = 50304  # GPT-2's, padded
WARM_UP = 20  # delayed scaling is just-in-time for 16 steps: measure the steady state


def configuration(level: str, options: argparse.Namespace) -> Config:
    """Return the preset as the trainer would run it at a precision with flags (`tools.precisions`), on one process."""
    flags = ["--preset", options.preset]
    flags += ["--micro-batch-size", str(options.micro_batch_size)]
    flags += ["--global-batch-size", str(options.micro_batch_size), "--train-iters", "10000"]
    flags += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    flags += ["--no-sequence-parallel"] if PRESETS[options.preset]["sequence_parallel"] else []
    return parse_args([*flags, *case_flags(level), *shlex.split(options.flags)])


def random_batches(config: Config, vocab_size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield the same random tokens forever; with context parallelism this rank's part of them."""
    shape = (config.training.micro_batch_size, config.model.seq_length + 1)
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(shape[0], shape[1] - 1, device=device),
        "position_ids": torch.arange(shape[1] - 1, device=device).expand(shape[0], -1),
    }
    return itertools.repeat(own_part(batch, Grid.current().context) if config.parallel.context_parallel_size > 1 else batch)


def utilisation(config: Config, tflops: float) -> dict[str, float | str]:
    """Return the columns of MFU; empty if the peak is unknown."""
    shares = mfu(tflops, peak_tflops(config))
    return {key: round(shares[key], 3) if key in shares else "" for key in ("mfu_bf16_peak", "mfu_fp8_peak")}


def measure(level: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row; needs `process_groups.initialize`."""
    config = configuration(level, options)
    training = build_training(config, options.vocab_size)
    device = process_groups.device()
    batches = random_batches(config, options.vocab_size, device)
    if options.as_stage and (reason := capture.obstacle(config)) is not None:
        raise ValueError(f"--as-stage: no graph can be captured, since {reason}")
    graphs = StageGraphs(training, "step") if options.as_stage else step_graph.build(training)
    recorded = config.logging.record_precision
    recorder = Recorder(training, recorded, config.logging.record_interval, lambda *_: None) if recorded else None
    times = []
    for step in range(options.warm_up + options.steps):
        if step == 1 and device.type == "cuda":  # a replayed graph allocates nothing: its peak is the peak of the step that captured it
            torch.cuda.reset_peak_memory_stats()
        _synchronize(device)
        start = time.perf_counter()
        recording = recorder.step(step + 1) if recorder is not None and recorder.due(step + 1) else contextlib.nullcontext()
        with recording, guarded(training, step + 1):
            result = train_step(training, batches, graphs, recorder)
        if changes := check_guard(training, step + 1):
            raise ValueError(f"{level}: {changes[0]}; with wider bounds the guard measures only")
        _synchronize(device)
        times.append(time.perf_counter() - start)
    low, median, high = rows.percentiles(times[options.warm_up :])
    if recorder is not None:
        recorder.close()
    tokens = training.micro_batches * config.training.micro_batch_size * config.model.seq_length
    tflops = flops_per_token(config.model, config.padded_vocab_size(options.vocab_size)) * tokens / median / 1e12
    cuda = device.type == "cuda"
    return {
        "case": level + f" recorded every {config.logging.record_interval}" * bool(recorded) + " (as a stage)" * options.as_stage,
        "params_m": round(sum(p.numel() for p in training.model.parameters()) / 1e6, 1),
        "ms_p20": round(low * 1e3, 1),
        "ms": round(median * 1e3, 1),
        "ms_p80": round(high * 1e3, 1),
        "tokens_s_gpu": round(tokens / median),
        "tflops": round(tflops, 1),
        **utilisation(config, tflops),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else "",
        "rest_gib": round(torch.cuda.memory_allocated() / 2**30, 2) if cuda else "",
        "loss": round(float(result.loss_sum / result.tokens), 4),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peer_rows(command: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that a baseline prints; the name of a failed case includes its error, so that the failure is recorded."""
    script = next((word for word in shlex.split(command) if word.endswith(".py")), command)
    name = Path(script).stem.removeprefix("bench_")
    output = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, check=False).stdout
    for line in output.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict) and "case" in row:
                suffix = f" ({row['error']})" if "error" in row else ""
                yield row | {"case": f"{name} {row['case']}{suffix}"}


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--levels",
        nargs="*",
        default=list(OPT_LEVELS),
        type=legal_case,
        help="levels and precisions, such as O2, O2+blockwise or 'O3 --deterministic'",
    )
    parser.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--as-stage", action="store_true", help="replay as a pipeline stage does")
    parser.add_argument("--vocab-size", type=count(1), default=VOCABULARY)
    parser.add_argument("--warm-up", type=count(0), default=WARM_UP, help="steps that are not measured")
    parser.add_argument("--steps", type=count(2), default=10, help="measured steps")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain")
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="also measure a baseline; can be repeated")
    rows.add_flags(parser, "step.csv")
    options = parser.parse_args(argv)
    vocabulary = f"--vocab-size {options.vocab_size}" if options.vocab_size != VOCABULARY else ""
    common = {
        "preset": " ".join(f"{options.preset} {options.flags} {vocabulary}".split()),
        "micro_batch": options.micro_batch_size,
        "gpus": 1,
    }
    where = rows.machine(options.commit)
    if options.levels:
        process_groups.initialize(configuration(options.levels[0], options))
    for level in options.levels:
        _report(options.csv, where, common | measure(level, options))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for command in options.peer:
        for row in peer_rows(command):
            _report(options.csv, where, common | row)
    return 0


def _report(path: Path, where: dict[str, str], row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    rows.append(path, [where | {column: row.get(column, "") for column in COLUMNS}])


if __name__ == "__main__":
    sys.exit(main())
