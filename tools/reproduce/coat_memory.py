"""Measure COAT's claim on one GPU: speed and memory at one micro-batch, and the largest micro-batch that fits, with its speed.

    python tools/reproduce/coat_memory.py                                   GPT-1.3B at bf16, O3 and coat
    python tools/reproduce/coat_memory.py --preset 7b --micro-batch-size 1 --cases bf16 coat "O3 --save-activations coat"

A case is a level or precision and further flags of megatron.lm.pretrain. Every trial runs `tools/bench/bench_step.py` in its own process,
so that one that runs out of memory does not affect the others. From --micro-batch-size the micro-batch is doubled while it fits; a
bisection then narrows the limit to an eighth, or to 1.

Each trial is written to --csv when it ends, without times if it did not fit. Trials with the same case, preset, steps, further flags, GPU,
driver, torch and commit (give --commit, since a new row changes the tree) are not repeated, so that an interrupted call resumes. The
paper's figures are 1.54 times less memory and 1.43 times the speed of BF16 (COAT, abstract); the table shows ours, relative to the first
case.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.lm.config.presets import PRESETS
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file
from tools.bench import rows
from tools.bench.bench_step import WARM_UP
from tools.precisions import precision_flags

CASES = ("bf16", "O3", "coat")
MEASURED = ("ms", "tokens_s_gpu", "peak_gib", "rest_gib")
TRIAL_SECONDS = 300  # a trial that hangs after running out of memory must not block the others
MEMORY_ERRORS = ("out of memory", "OutOfMemoryError", "ALLOC_FAILED")  # of torch and CUDA, and of cuBLAS and cuDNN
TABLE = ("case", "micro_batch", "ms", "tokens_s", "peak_gib", "speed", "less_memory", "largest", "its_tokens_s", "its_speed")

Row = Mapping[str, Any]


def command(case: str, micro_batch: int, options: argparse.Namespace, folder: str) -> list[str]:
    """Return the command that measures a case."""
    level, *flags = shlex.split(case)
    flags += shlex.split(options.flags)
    words = (
        f"--levels {level} --preset {options.preset} --micro-batch-size {micro_batch} --warm-up {options.warm_up} --steps {options.steps}"
    )
    return [sys.executable, "-m", "tools.bench.bench_step", *shlex.split(words), f"--flags={shlex.join(flags)}", "--csv", f"{folder}/a.csv"]


def measure(case: str, micro_batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one trial and return its `MEASURED` values; empty strings if it ran out of memory.

    Raises:
        RuntimeError: it fails otherwise; with the end of its stderr.
        subprocess.TimeoutExpired: after `TRIAL_SECONDS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = command(case, micro_batch, options, folder)
        done = subprocess.run(words, cwd=rows.ROOT, capture_output=True, text=True, check=False, timeout=TRIAL_SECONDS)
    if done.returncode == 0:
        report = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
        return {key: report[key] for key in MEASURED}
    if any(error in done.stderr for error in MEMORY_ERRORS):
        return dict.fromkeys(MEASURED, "")
    raise RuntimeError(f"{case} with micro-batch {micro_batch} failed with {done.returncode}:\n{done.stderr[-2000:]}")


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Return a micro-batch that fits while one larger by an eighth, or by 1, does not; 0 if `start` does not fit."""
    if not fits(start):
        return 0
    low, high = start, 2 * start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def table(cases: Mapping[str, Mapping[int, Row]], at: int) -> list[dict[str, Any]]:
    """Return a line per case: its trials at micro-batch `at` and at the largest that fits, and both relative to the first case."""

    def both(trials: Mapping[int, Row]) -> tuple[Row, int, Row]:
        held = max((size for size, row in trials.items() if row["ms"] != ""), default=0)
        return trials[at], held, trials.get(held, dict.fromkeys(MEASURED, ""))

    def quotient(a: Any, b: Any) -> float | str:
        return "" if "" in (a, b) else round(float(a) / float(b), 2)

    base, _, base_there = both(next(iter(cases.values())))
    lines = []
    for case, (here, held, there) in ((case, both(trials)) for case, trials in cases.items()):
        speed, its_speed = (quotient(row["tokens_s_gpu"], of["tokens_s_gpu"]) for row, of in ((here, base), (there, base_there)))
        same = (here["ms"], here["tokens_s_gpu"], here["peak_gib"], speed, quotient(base["peak_gib"], here["peak_gib"]))
        lines.append(dict(zip(TABLE, (case, at, *same, held, there["tokens_s_gpu"], its_speed), strict=True)))
    return lines


def search(case: str, options: argparse.Namespace, where: Row) -> dict[int, Row]:
    """Return the trials of a case by micro-batch: those in --csv, and the missing ones, which are run and appended."""
    kept = {key: str(value) for key, value in vars(options).items() if key in ("preset", "flags", "warm_up", "steps")}
    same = {**where, "case": case, **kept}
    del same["date"]
    trials: dict[int, Row] = {}
    if options.csv.exists():
        with options.csv.open(encoding="utf-8", newline="") as stream:
            trials = {int(row["micro_batch"]): row for row in csv.DictReader(stream) if same.items() <= row.items()}

    def fits(micro_batch: int) -> bool:
        if micro_batch not in trials:
            trials[micro_batch] = measure(case, micro_batch, options)
            row = {"case": case, **kept, "micro_batch": micro_batch, **trials[micro_batch]}
            rows.append(options.csv, [{**where, **row}])
            print(json.dumps(row), flush=True)
        return trials[micro_batch]["ms"] != ""

    largest(fits, options.micro_batch_size)
    return trials


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing trials and print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="'LEVEL FLAGS'")
    parser.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    parser.add_argument("--micro-batch-size", type=count(1), default=4, help="micro-batch of the comparison, and start of the search")
    parser.add_argument("--warm-up", type=count(1), default=WARM_UP, help="steps that are not measured")
    parser.add_argument("--steps", type=count(2), default=5, help="measured steps")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain, for every case")
    parser.add_argument("--csv", type=output_file, default=rows.ROOT / "tools/reproduce/results/coat_memory.csv")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(argv)
    for case in options.cases:
        try:
            precision_flags(case.split(" ")[0])
        except ValueError as error:
            parser.error(f"--cases {case!r}: give a precision, then its flags, in the same quotes; {error}")
    if not torch.cuda.is_available():
        parser.error("no GPU is available: this tool requires one")
    where = rows.machine(options.commit)
    lines = table({case: search(case, options, where) for case in options.cases}, options.micro_batch_size)
    print("| " + " | ".join(TABLE) + " |", "|" + " --- |" * len(TABLE), sep="\n")
    for line in lines:
        print("| " + " | ".join(str(line[column]) for column in TABLE) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
