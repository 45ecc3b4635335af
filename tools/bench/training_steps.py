"""Build a GPT's training as the trainer does, take steps of it on random tokens, and append a row per case to a CSV.

`bench_step.py` (one GPU) and `bench_grid.py` (GPUs of one host) are this file and their own columns. A step is
forward, backward, clipping and update, replayed as CUDA graphs unless the flags prevent it. All ranks have the same random tokens, the same
in every step, so that the last loss shows how well a case has memorized them.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, published_vocabulary
from megatron.lm.data.batch import own_part
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import Grid
from megatron.lm.run.reports.metrics import least_and_most
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from megatron.lm.training.state import StepResult, Training
from tools.bench import rows
from tools.precisions import case_flags

Step = Callable[[], Any]
Row = dict[str, Any]
VOCABULARY = 50304  # GPT-2's, padded
WARM_UP = 20  # delayed scaling is just in time for 16 steps: measure the steady state
TIMES = ("ms_p20", "ms", "ms_p80", "tokens_s_gpu")
MEMORY = ("peak_gib_min", "peak_gib_max", "rest_gib_min", "rest_gib_max")
LEAVING_SECONDS = 10.0  # time for the other ranks' processes to end and free their GPUs


def parser(description: str | None, csv: str) -> argparse.ArgumentParser:
    """Return the parser of the flags that both programs have, with results in the file `csv`; the caller adds cases and warm-up."""
    flags = _sizes_parser(description, PRESETS)
    flags.add_argument("--vocab-size", type=count(1), default=VOCABULARY)
    flags.add_argument("--flags", default="", help="more flags of msamp pretrain, for every case")
    flags.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="also measure a baseline; can be repeated")
    rows.add_flags(flags, csv)
    return flags


def _sizes_parser(description: str | None, presets: Iterable[str]) -> argparse.ArgumentParser:
    flags = Parser(description=description)
    flags.add_argument("--preset", default="1.3b", choices=list(presets))
    flags.add_argument("--micro-batch-size", type=count(1), default=4)
    flags.add_argument("--steps", type=count(2), default=10, help="that are measured")
    return flags


def baseline_parser(
    description: str | None, cases: Iterable[str], default: Iterable[str], builds: Iterable[str], presets: Iterable[str] = PRESETS
) -> argparse.ArgumentParser:
    """Return the parser of a baseline on one GPU, which prints its rows; `default` are the cases without --cases."""
    flags = _sizes_parser(description, presets)
    flags.add_argument("--cases", nargs="+", choices=list(cases), default=list(default))
    flags.add_argument("--builds", nargs="+", choices=list(builds), default=list(builds))
    flags.add_argument("--layers", type=count(1), help="(default: the preset's)")
    return flags


def baseline_shape(options: argparse.Namespace) -> tuple[Row, int]:
    """Return the preset's entries, with --layers, and its vocabulary, padded to a multiple of 128."""
    shape = PRESETS[options.preset] | ({"num_layers": options.layers} if options.layers else {})
    return shape, -(-published_vocabulary(options.preset) // 128) * 128


def print_rows(cases: Iterable[str], measurements: Callable[[str], Iterable[Row]]) -> int:
    """Print the measurements of each case as they come, as JSON, or the error of a case that fails; return the exit code."""
    failed = 0
    for case in cases:
        try:
            for row in measurements(case):
                print(json.dumps(row), flush=True)
        except Exception as error:
            failed = 1
            text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            print(json.dumps({"case": case, "error": text[:120]}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return failed


def configuration(case: str, options: argparse.Namespace) -> Config:
    """Return the preset as the trainer would run it at a precision with flags (`tools.precisions`), on one process."""
    flags = ["--preset", options.preset, "--micro-batch-size", str(options.micro_batch_size)]
    flags += ["--global-batch-size", str(options.micro_batch_size), "--train-iters", "10000"]
    flags += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    flags += ["--no-sequence-parallel"] if PRESETS[options.preset]["sequence_parallel"] else []
    return parse_args([*flags, *case_flags(case), *shlex.split(options.flags)])


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


def prepare(config: Config, options: argparse.Namespace, warm_ups: int) -> tuple[Training, Callable[[], StepResult]]:
    """Return a training and a step of it, after `warm_ups` steps; collective; needs `process_groups.initialize`."""
    training = build_training(config, options.vocab_size)
    batches = random_batches(config, options.vocab_size, process_groups.device())
    step = functools.partial(train_step, training, batches, step_graph.build(training))
    warm_up(step, warm_ups)
    training.grad_sync.sent.take()
    return training, step


def warm_up(step: Step, steps: int) -> None:
    """Take steps that are not measured. The peak of memory counts from the second one on, with the one that captures a graph: its replays
    allocate nothing."""
    for number in range(steps):
        if number == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        step()


def step_times(step: Step, steps: int) -> tuple[list[float], Any]:
    """Return the seconds of each of `steps` steps on this rank, without a host synchronization between them, and the last result."""
    if not torch.cuda.is_available():
        return synchronized_step_times(step, steps)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        result = step()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)], result


def synchronized_step_times(step: Step, steps: int) -> tuple[list[float], Any]:
    """Return the seconds of each of `steps` steps by the host's clock, with the device idle before and after each, and the last result."""
    times = []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        result = step()
        synchronize()
        times.append(time.perf_counter() - start)
    return times, result


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_columns(times: Sequence[float], tokens: float) -> Row:
    """Return the columns `TIMES` from seconds per step; `tokens` are those of a step per GPU."""
    return rows.percentile_columns("ms", times, 1e3, 1) | {"tokens_s_gpu": round(tokens / statistics.median(times))}


def memory() -> Row:
    """Return the columns peak_gib and rest_gib: GiB allocated by torch on this process's GPU, peak and now; empty without CUDA."""
    if not torch.cuda.is_available():
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "rest_gib": round(torch.cuda.memory_allocated() / 2**30, 2)}


def memory_columns() -> Row:
    """Return the columns `MEMORY`: those of `memory` of the ranks with the least and the most; empty without CUDA; collective."""
    return {f"{name}_{end}": gib for name, size in memory().items() for end, gib in zip(("min", "max"), least_and_most(size), strict=True)}


def peer_rows(commands: Sequence[str], processes: int) -> Iterator[Row]:
    """Yield the JSON objects that baselines print, after our other ranks have left the GPUs.

    The name of a failed case includes its error, so that the failure is recorded. A baseline's memory counts as the fullest rank's.
    """
    if commands and processes > 1 and torch.cuda.is_available():
        time.sleep(LEAVING_SECONDS)
    for command in commands:
        script = next((word for word in shlex.split(command) if word.endswith(".py")), command)
        name = Path(script).stem.removeprefix("bench_")
        with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():  # as it is printed: what is killed keeps its finished cases
                with contextlib.suppress(json.JSONDecodeError):
                    row = json.loads(line)
                    if isinstance(row, dict) and "case" in row:
                        fullest = {f"{key}_max": row[key] for key in ("peak_gib", "rest_gib") if key in row}
                        yield fullest | row | {"case": f"{name} {row['case']}" + f" ({row.get('error')})" * ("error" in row)}


def run(
    cases: Sequence[tuple[str, Config]],
    measure: Callable[[str, Config], Row],
    columns: Sequence[str],
    options: argparse.Namespace,
    common: Row,
    of_peer: Callable[[Row], Row] = lambda row: row,
) -> int:
    """Measure cases one after the other, then the baselines; rank 0 prints each row and appends it at once.

    A case that runs out of memory loses only itself and those after it: one model is in memory at a time, with process groups of its own.

    Args:
        cases: name and configuration of each.
        measure: returns the columns of a case; collective, on every rank.
        columns: of the file, after those of `rows.machine`; what a row lacks is left empty.
        options: with `csv`, `commit` and `peer`.
        common: columns of all rows.
        of_peer: adds columns to a baseline's row.
    """
    launch = process_groups.launch_from_environment()
    where = rows.machine(options.commit) if launch.rank == 0 else {}

    def report(row: Row) -> None:
        print(json.dumps(row), flush=True)
        rows.append(options.csv, [where | {column: row.get(column, "") for column in columns}])

    for case, config in cases:
        process_groups.initialize(config)
        row = common | {"case": case, "level": case.split()[0]} | measure(case, config)
        if launch.rank == 0:
            report(row)
        process_groups.leave_grid()
        gc.collect()
        torch.cuda.empty_cache()
    process_groups.shutdown()
    if launch.rank == 0:
        for row in peer_rows(options.peer, launch.world_size):
            report(common | of_peer(row))
    return 0
