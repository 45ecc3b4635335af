"""Compare all precisions on one model, text and seed: final validation loss, speed and memory in one table, and the curves.

    python tools/reproduce/compare_precisions.py --data data/enwik8 --out runs/precisions
    ... --precisions bf16 collage-plus O2+blockwise 'O2 --master-format bf16' --seeds bf16=3 --at-once 3 --flags "--adam-beta2 0.999"

The default is GPT-125M for 2,000 steps of 8k tokens, one epoch of cleaned enwik8 (`msamp prepare-text`); --flags come last and
override it. Each run is a msamp pretrain with its metrics in --out; a complete run is not repeated, so a list can grow. Losses of a
precision with several seeds are reported as mean, minimum and maximum, and against BF16's of the same seeds as mean and half width of the
95 % interval (`megatron.lm.evaluation.paired_difference`); a verdict is printed for each. Each run uses one of the visible GPUs. With
--at-once runs share a GPU; speed and memory then come from a short run of each precision with a GPU to itself, which runs first. Then comes
the first seed of each precision, then the second. --no-speed skips the short runs and leaves the speed empty, to compare losses alone:

    ... --precisions bf16 O2 --seeds bf16=8 O2=8 --steps 1000 --flags "--min-lr 0" --at-once 4 --no-speed

With --processes N each run is N processes on as many GPUs, data-parallel unless --flags, which BF16 gets too, say otherwise:

    ... --processes 2 --precisions bf16 "O3 --micro-batch-size 8" "O3 --micro-batch-size 8 --grad-exchange nccl"
    ... --processes 2 --precisions bf16 O3 --flags "--tensor-model-parallel-size 2 --sequence-parallel" --no-speed

Processes of a run wait for one another, on shared GPUs for each other's time slices too, so let few runs share them.
Pairs of seeds as time permits, added to those on file (--seconds: no run starts that would end later than the longest one took; call again
with another --out on another machine, and copy its two files over those on file):

    ... --precisions bf16 O3 --seeds bf16=10 O3=10 --no-speed --seconds 500 --on-file tools/reproduce/results/long_100m

Writes precisions.csv (`on_file`: runs of --on-file, perhaps of other commits) and curves.csv of complete runs, and lists the others.
"""

import argparse
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch

from megatron.lm.evaluation.paired_difference import PairedDifference, paired_difference
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.tools.report import Run, read_run, write_curves
from msamp.numerics import recipe
from tools.bench import rows
from tools.measurements import read
from tools.precisions import case_flags, legal_case

STEPS, SPEED_STEPS, FIRST_SEED = 2000, 60, 1234
BASE = "bf16"  # the baseline of the comparisons
LR_WARM_UP = 150
STOP_SECONDS = 40  # torchrun itself kills processes that have not ended after 30 s
SHAPE = "--preset 125m --micro-batch-size 4 --global-batch-size 4"
COURSE = "--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --fp8-min-gain 0 --log-interval 10 --eval-iters 40"
COLUMNS = ("precision", "seeds", "valid_loss", "least", "most", "against_bf16", "half_width", "tokens_s", "peak_gib", "state_bytes_param")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run: precision with flags, seed, steps, its folder in --out, and its processes."""

    precision: str
    seed: int
    steps: int
    name: str
    processes: int = 1


def seeds_of(texts: Sequence[str]) -> dict[str, range]:
    """Parse `PRECISION=N` and `PRECISION=FIRST:END` flags into the numbers of the seeds per precision, 0 to N - 1 or FIRST to END - 1.

    Raises:
        ValueError: the form is wrong, the precision unknown, or there is no seed.
    """
    seeds = {}
    for text in texts:
        precision, _, numbers = text.rpartition("=")
        first, colon, end = numbers.rpartition(":")
        if not end.isdecimal() or (colon and not first.isdecimal()) or int(end) <= int(first or 0):
            raise ValueError(f"--seeds {text}: give PRECISION=N, N at least 1, or PRECISION=FIRST:END, FIRST below END")
        case_flags(precision)
        seeds[precision] = range(int(first or 0), int(end))
    return seeds


def command(job: Job, options: argparse.Namespace) -> list[str]:
    """Return the command that trains a job."""
    data, metrics = shlex.quote(str(options.data)), shlex.quote(str(options.out / job.name / "metrics.jsonl"))
    text = f"--train-data-path {data}/train_text_document --valid-data-path {data}/valid_text_document"
    words = f"--tokenizer-type GPT2BPETokenizer --vocab-file {data}/encoder.json --merge-file {data}/vocab.bpe"
    course = f"{shlex.join(case_flags(job.precision))} --seed {job.seed} --train-iters {job.steps} --eval-interval {-(-job.steps // 4)}"
    course += f" --lr-warmup-iters {min(LR_WARM_UP, job.steps // 4)}"
    flags = f"{SHAPE} {COURSE} {text} {words} {course} --metrics-file {metrics} {options.flags}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes)] if job.processes > 1 else []
    return [sys.executable, *launcher, "-m", "megatron.lm.pretrain", *shlex.split(flags)]


def complete(job: Job, options: argparse.Namespace) -> bool:
    """Return whether a job has already finished: its last evaluation is recorded."""
    try:
        run = read_run(job.name, options.out / job.name / "metrics.jsonl")
    except ValueError:  # no file, or the run was stopped before its first line
        return False
    return any(line["iteration"] == job.steps for line in run.valid)


def cards(processes: int = 1) -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES per run of so many processes; "" if no GPU is visible.

    Raises:
        ValueError: fewer GPUs are visible than a run has processes.
    """
    named = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    named = named or [str(card) for card in range(torch.cuda.device_count())]
    if named and len(named) < processes:
        raise ValueError(f"--processes {processes}: {len(named)} GPUs are visible; give at most as many")
    return [",".join(named[first : first + processes]) for first in range(0, len(named) - processes + 1, processes)] or [""]


def train(job: Job, options: argparse.Namespace, card: str) -> None:
    """Run a job on a GPU unless it is complete. Its output goes to log.txt next to its metrics."""
    if complete(job, options):
        return
    folder = options.out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of an interrupted run
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": card}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        running = subprocess.Popen(command(job, options), env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = running.wait()
        except BaseException:  # an interrupt
            stop(running)
            raise
    print(f"{job.name}: " + ("done" if status == 0 else f"failed with {status}, see {folder}/log.txt"), flush=True)


def stop(running: "subprocess.Popen[bytes]") -> None:
    """End a run by SIGTERM, at which a launcher of several processes ends them too; kill it if it takes longer than STOP_SECONDS."""
    running.terminate()
    try:
        running.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def train_all(jobs: Sequence[Job], options: argparse.Namespace, at_once: int, after: Callable[[], object] = lambda: None) -> None:
    """Run jobs in order, `at_once` per GPU (or per set of GPUs, with several processes); the next goes to the first that is free, unless it
    would end after `options.end` if it took as long as the longest one. `after`: called after each."""
    free: SimpleQueue[str] = SimpleQueue()
    for card in cards(options.processes) * at_once:
        free.put(card)
    took, lock = [0.0], Lock()

    def one(job: Job) -> None:
        card, start = free.get(), time.monotonic()
        try:
            if start + max(took) < getattr(options, "end", math.inf) and not complete(job, options):
                train(job, options, card)
                took.append(time.monotonic() - start)
                with lock:
                    after()
        finally:
            free.put(card)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(one, jobs))


def against_base(runs: Mapping[int, Run], base: Mapping[int, Run]) -> PairedDifference | None:
    """Compare the last validation losses with the baseline's, by seed; None if the baseline lacks one of the seeds."""
    if not runs.keys() <= base.keys():
        return None
    ours, theirs = ({seed: some[seed].valid[-1]["loss"] for seed in runs} for some in (runs, base))
    return paired_difference(theirs, ours)


def row_of(precision: str, runs: Mapping[int, Run], speed: Run, base: Mapping[int, Run], *, timed: bool = True) -> dict[str, Any]:
    """Return a line of the table from a precision's runs by seed; `base`: BF16's runs; `timed`: whether `speed` had the GPU to itself.

    Seeds differ by more than most precisions do, so that only runs of the same seeds are compared; the comparison is empty if bf16 lacks
    one.
    """
    losses = [run.valid[-1]["loss"] for run in runs.values()]
    mean = statistics.fmean(losses)
    against = against_base(runs, base)
    width = None if against is None else against.relative.half_width
    late = [line for line in speed.train if line["iteration"] > speed.train[-1]["iteration"] / 2]  # graphs are captured by then
    late = [line for line in late if "tokens_per_s" in line]  # a run on file has none
    sizes = speed.precision["bytes_per_parameter"] if speed.precision else {}
    return {
        "precision": precision,
        "seeds": len(losses),
        "valid_loss": round(mean, 4),
        "least": round(min(losses), 4),
        "most": round(max(losses), 4),
        "against_bf16": "" if against is None else f"{100 * against.relative.mean:+.2f} %",
        "half_width": "" if width is None else f"{100 * width:.2f} %",
        "tokens_s": round(statistics.median(line["tokens_per_s"] for line in late)) if timed and late else "",
        "peak_gib": round(max(line["memory_gib"] for line in late), 2) if late else "",
        "state_bytes_param": round(sum(sizes.values()), 2) if sizes else "",
    }


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, then write the table of the complete runs; return 1 if some are incomplete."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data", default="data/enwik8", help="folder that msamp prepare-text wrote")
    parser.add_argument("--out", type=path, default=Path("runs/precisions"))
    parser.add_argument("--precisions", nargs="+", default=list(recipe.names()), type=legal_case, metavar="'PRECISION FLAGS'")
    parser.add_argument(
        "--seeds",
        nargs="*",
        default=["bf16=3", "O2=3"],
        metavar="PRECISION=N",
        help="more than one seed (default: %(default)s); FIRST:END for N adds seeds to those of another call",
    )
    parser.add_argument("--steps", type=count(4), default=STEPS)
    parser.add_argument("--speed-steps", type=count(4), default=SPEED_STEPS, help="steps of the short runs with --at-once")
    parser.add_argument("--no-speed", action="store_true", help="no short runs with --at-once: leave the speed empty")
    parser.add_argument("--at-once", type=count(1), default=1, help="trainings that share a GPU (default: %(default)s)")
    parser.add_argument("--processes", type=count(1), default=1, help="processes of each run (default: %(default)s)")
    parser.add_argument("--seconds", type=count(1), help="of this call, for all runs")
    parser.add_argument("--on-file", type=path, help="folder with precisions.csv and curves.csv, whose runs are complete")
    parser.add_argument("--flags", default="", help="more flags of msamp pretrain, for every run")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(argv)
    options.command = shlex.join(["python", "tools/reproduce/compare_precisions.py", *(sys.argv[1:] if argv is None else argv)])
    options.end = time.monotonic() + options.seconds if options.seconds else math.inf
    seeds = seeds_of(options.seeds)
    cards(options.processes)  # refuse too many before anything runs
    options.restored = restore(options.on_file / "curves.csv", options.out) if options.on_file else set()
    jobs = {p: [job_of(p, number, options.steps, options.processes) for number in seeds.get(p, range(1))] for p in options.precisions}
    alone = alone_of(jobs, options)
    by_seed = itertools.chain.from_iterable(itertools.zip_longest(*jobs.values()))
    first = [] if options.no_speed else list(alone.values())
    shared = [job for job in by_seed if job is not None and job not in first]

    def tables() -> list[Job]:
        missing = [job for job in (*first, *shared) if not complete(job, options)]
        whole = {p: [job for job in jobs[p] if job not in missing] for p in jobs if alone[p] not in first or alone[p] not in missing}
        if any(whole.values()):
            write({p: of_precision for p, of_precision in whole.items() if of_precision}, alone, options)
        return missing

    train_all(first, options, 1)
    train_all(shared, options, options.at_once, after=tables)
    if missing := tables():
        print("missing: " + ", ".join(job.name for job in missing))
    return int(bool(missing))


def job_of(precision: str, number: int | str, steps: int, processes: int = 1) -> Job:
    """Return a numbered run, whose seed follows from the number, or the run that has the GPU to itself, with the first seed."""
    seed = FIRST_SEED + number if isinstance(number, int) else FIRST_SEED
    return Job(precision=precision, seed=seed, steps=steps, name=f"{folder_of(precision)}_{number}", processes=processes)


def alone_of(jobs: Mapping[str, Sequence[Job]], options: argparse.Namespace) -> dict[str, Job]:
    """Return, by precision, the run that has the GPU to itself, whose speed is reported: a short one if the others share the GPU."""
    short = options.at_once > 1 and not options.no_speed
    return {p: job_of(p, "alone", options.speed_steps, options.processes) if short else of_precision[0] for p, of_precision in jobs.items()}


def restore(curves: Path, out: Path) -> set[str]:
    """Write the metrics of the runs in a curves.csv to --out, unless they are there, and return their names; a missing file has none."""
    lines: dict[str, list[str]] = {}
    for row in read(str(curves.resolve())) if curves.is_file() else ():
        numbers = {name: json.loads(value) for name, value in row.items() if name not in ("run", "kind") and value}
        lines.setdefault(row["run"], []).append(json.dumps({"kind": row["kind"], **numbers}) + "\n")
    for name, some in lines.items():
        file = out / name / "metrics.jsonl"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(some), encoding="utf-8")
    return set(lines)


def folder_of(precision: str) -> str:
    """Return the prefix of a run's folder for a precision with its flags."""
    return re.sub(r"[\s-]+", "-", precision)


def write(jobs: Mapping[str, Sequence[Job]], alone: Mapping[str, Job], options: argparse.Namespace) -> None:
    """Write precisions.csv and curves.csv, and print the table."""

    def metrics(job: Job) -> Run:
        return read_run(job.name, options.out / job.name / "metrics.jsonl")

    runs = {precision: {job.seed: metrics(job) for job in of_precision} for precision, of_precision in jobs.items()}
    where = rows.machine(options.commit) | {"command": options.command}
    if options.processes > 1:
        where["gpu"] = f"{options.processes} x {where['gpu']}"
    base, timed = runs.get("bf16", {}), not options.no_speed
    speed = {
        precision: metrics(alone[precision]) if timed else next(iter(of_precision.values())) for precision, of_precision in runs.items()
    }
    table = [where | row_of(precision, of_precision, speed[precision], base, timed=timed) for precision, of_precision in runs.items()]
    on_file = {precision: sum(job.name in options.restored for job in of_precision) for precision, of_precision in jobs.items()}
    rows.write(options.out / "precisions.csv", [*table[0], "on_file"], [row | {"on_file": on_file[row["precision"]]} for row in table])
    print("| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), sep="\n")
    for row in table:
        print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    for precision, of_precision in runs.items():
        if precision != BASE and (difference := against_base(of_precision, runs.get(BASE, {}))) is not None:
            course = [(line["iteration"], line["loss"]) for run in runs[BASE].values() for line in run.valid]
            print(difference.sentence(BASE, precision, curve=course))
    every = [run for of_precision in runs.values() for run in of_precision.values()]
    write_curves(every, options.out / "curves.csv")


if __name__ == "__main__":
    sys.exit(main())
