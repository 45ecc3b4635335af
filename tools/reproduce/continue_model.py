"""Continue a trained model at several precisions, and judge each twice: in the layers it was trained with, and in BF16.

    python -m megatron.lm.tools.convert_checkpoint from-hf --load smollm2 --output imported          prints the model's flags
    python -m tools.reproduce.continue_model --load imported --out runs/continued --seeds 3 --at-once 3 \
        --cases O0 O1 O2 O3 coat 'O3 --fp8-guard' --flags "MODEL'S FLAGS --micro-batch-size 8 --global-batch-size 8 --train-iters 1221 \
        --lr 1e-4 --train-data-path corpus_text_document --valid-data-path held_out_text_document"

FP8 layers cast every operand, which moves the loss before the first step, most of all in a model with outliers. So each case and seed has
four numbers, all of them losses on the same held-out batches, which the seed draws:

    start       the model before any training, in the case's layers
    own         after training, in the case's layers
    bf16        after training, the same values in BF16 layers
    start_bf16  the model before any training in BF16 layers, the same for all cases

All FP8 layers are FP8, however little they gain, unless --flags has --fp8-min-gain. Every visible GPU is used; --at-once runs share one. A
complete run is not repeated, so the same command continues after --minutes; another command is refused, since each run's folder in --out
has the words it was started with. continued.csv has a row per case and seed (`COLUMNS`), and the differences from the first case over the
seeds are printed with their 95 % intervals. A model is judged by a run whose learning rate is too small to change a weight.
"""

import argparse
import itertools
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.lm.evaluation.paired_difference import paired_difference
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.tools.report import read_run
from tools.bench import rows
from tools.precisions import case_flags, legal_case
from tools.reproduce import compare_precisions
from tools.reproduce.compare_precisions import FIRST_SEED, Job, Session, folder_of

BF16 = "bf16"
OWN, PLAIN, START = "own", "bf16", "start"  # what a run measures; the name of its folder ends with it
COLUMNS = ("case", "seed", "start_bf16", "start", "own", "bf16")
JUDGED = 20  # steps of a run that only judges: delayed scaling has its first window after 16
STILL = "--lr 1e-30 --min-lr 0 --lr-warmup-iters 0 --lr-decay-style constant --weight-decay 0"


def job(case: str, measure: str, number: int, steps: int) -> Job:
    """Return a run of a case that measures one of `OWN`, `PLAIN` and `START`, with a numbered seed."""
    return Job(precision=case, seed=FIRST_SEED + number, steps=steps, name=f"{folder_of(case)}_{number}_{measure}")


def start_of(case: str, number: int) -> Job:
    """Return the run that judges the model before any training in a case's layers; cases without FP8 share BF16's."""
    return job(BF16 if case_flags(case) == case_flags(BF16) else case, START, number, JUDGED)


def command(one: Job, options: argparse.Namespace) -> list[str]:
    """Return the command of a run."""
    out, measure = options.out / one.name, one.name.rpartition("_")[2]
    trained = options.out / one.name.replace(f"_{PLAIN}", f"_{OWN}") / "checkpoint"
    words = ["--fp8-min-gain", "0", *shlex.split(options.flags)]
    words += case_flags(BF16 if measure == PLAIN else one.precision)
    words += ["--load", str(trained if measure == PLAIN else options.load), "--finetune", "--seed", str(one.seed)]
    words += ["--eval-interval", str(one.steps), "--metrics-file", str(out / "metrics.jsonl")]
    words += ["--save", str(out / "checkpoint"), "--save-interval", str(one.steps)] if measure == OWN else ["--train-iters", str(one.steps)]
    return [sys.executable, "-m", "megatron.lm.pretrain", *words, *(shlex.split(STILL) if measure != OWN else [])]


def loss_of(one: Job, options: argparse.Namespace) -> float:
    """Return the loss of a run's last evaluation."""
    return float(read_run(one.name, options.out / one.name / "metrics.jsonl").valid[-1]["loss"])


def results(options: argparse.Namespace, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each case and seed whose runs are complete."""

    def complete(one: Job) -> bool:
        return compare_precisions.complete(one, options)

    for case in options.cases:
        for number in range(options.seeds):
            plain, start = start_of(BF16, number), start_of(case, number)
            own, judged = job(case, OWN, number, steps), job(case, PLAIN, number, 1)
            if all(map(complete, (plain, start, own, judged))):
                losses = [round(loss_of(one, options), 4) for one in (plain, start, own, judged)]
                yield dict(zip(COLUMNS, (case, FIRST_SEED + number, *losses), strict=True))


def sentences(table: Sequence[Mapping[str, Any]], base: str) -> Iterator[str]:
    """Yield, for each other case, its differences from `base` over the seeds that both have, in both kinds of layers."""
    by_case: dict[str, dict[str, dict[int, float]]] = {}
    for row in table:
        for measure in (OWN, PLAIN):
            by_case.setdefault(row["case"], {}).setdefault(measure, {})[row["seed"]] = row[measure]
    for case, of_measure in by_case.items():
        for measure, losses in of_measure.items():
            common = {seed: loss for seed, loss in losses.items() if seed in by_case.get(base, {}).get(measure, {})}
            if case != base and common:
                difference = paired_difference(by_case[base][measure], common).sentence(base, case)
                yield f"in {'its own layers' if measure == OWN else 'BF16 layers'}: {difference}"


def train_iters(flags: str) -> int:
    """Return the number of steps in the common flags.

    Raises:
        ValueError: there is none.
    """
    words = shlex.split(flags)
    steps = [after for word, after in itertools.pairwise(words) if word == "--train-iters"]
    if not steps or not steps[-1].isdecimal() or int(steps[-1]) < 1:
        raise ValueError("--flags has no --train-iters N: give the steps of the training, and the model, data and learning rate")
    return int(steps[-1])


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the table of what is complete; return 1 if something is missing."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", type=path, required=True, help="checkpoint to continue, such as from-hf's")
    parser.add_argument("--out", type=path, default=Path("runs/continued"))
    parser.add_argument("--cases", nargs="+", type=legal_case, default=["O0", "O1", "O2", "O3", "coat"], metavar="'PRECISION FLAGS'")
    parser.add_argument("--seeds", type=count(1), default=3, help="of each case (default: %(default)s)")
    parser.add_argument("--at-once", type=count(1), default=1, help="runs that share a GPU (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes (default: no limit)")
    parser.add_argument(
        "--flags", required=True, help="flags of megatron.lm.pretrain for every run: model, data, batch, steps, learning rate"
    )
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: give a number above 0, or omit it for no limit")
    steps, options.processes = train_iters(options.flags), 1
    session = Session(end=time.monotonic() + 60 * options.minutes)
    numbers = range(options.seeds)
    starts = list(dict.fromkeys(start_of(case, number) for number in numbers for case in (BF16, *options.cases)))
    trained = [job(case, OWN, number, steps) for number in numbers for case in options.cases]
    judged = [job(case, PLAIN, number, 1) for number in numbers for case in options.cases]
    for one in (*starts, *trained, *judged):
        remember(one, options)
    for jobs in (starts, trained, judged):
        ready = [one for one in jobs if jobs is not judged or compare_precisions.complete(job_before(one, steps), options)]
        compare_precisions.train_all(ready, options, session, options.at_once, command)
        if jobs is starts and not all(compare_precisions.complete(one, options) for one in starts):
            break  # what the trainer refuses is seen before hours of training
    table = list(results(options, steps))
    if table:
        where = rows.machine(options.commit)
        rows.write(options.out / "continued.csv", [*where, *COLUMNS], [where | row for row in table])
        print("| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), sep="\n")
        for row in table:
            print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
        print(*sentences(table, options.cases[0]), sep="\n")
    missing = [one.name for one in (*starts, *trained, *judged) if not compare_precisions.complete(one, options)]
    if missing:
        print("missing: " + ", ".join(missing))
    return int(bool(missing))


def remember(one: Job, options: argparse.Namespace) -> None:
    """Write a run's command to its folder.

    Raises:
        ValueError: the folder is of another command.
    """
    file, words = options.out / one.name / "command.txt", shlex.join(command(one, options)[1:]) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") != words:
        raise ValueError(f"--out {options.out}: {file} is of a run with other flags or another --load: give another --out, or remove it")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(words, encoding="utf-8")


def job_before(one: Job, steps: int) -> Job:
    """Return the training whose checkpoint a run in BF16 layers judges."""
    return job(one.precision, OWN, one.seed - FIRST_SEED, steps)


if __name__ == "__main__":
    raise SystemExit(main())
