"""Fine-tune one chat model, with SFT and DPO, at several precisions: held-out loss of the trained layers, and of the BF16 export.

    python tools/reproduce/compare_tuning.py --load smollm2 --sft alpaca_en_demo.json --dpo dpo_en_demo.json --out runs/tuning \
        --cases O0 O2 'O2 --moment-rounding stochastic' --seeds 3 --at-once 4

A run is one `examples/sft/train.py` (learning rate 1e-5) or one `examples/rlhf/dpo.py` (5e-6) with the flags of a case, which come last, so
that `--cases 'O0 --lr 1e-6' 'O3 --lr 1e-6'` compares at another learning rate. FP8 layers move the loss before the first step, because they
cast every operand. That hides what the optimizer did, so each run is evaluated twice on the held-out rows: `own` with the layers that were
trained, and `bf16` with the exported weights in plain BF16 layers. DPO compares with the reference model in the same layers. The row
`start` is the model before any training.

Every visible GPU is used; --at-once runs share one. Each run writes result.json to its folder in --out and is not repeated once that file
exists, so that the same command continues after --minutes. Models and checkpoints are removed after the evaluation. tuning.csv has one row
per run (`COLUMNS`).
"""

import argparse
import importlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from megatron.lm.post import chat, models, saved
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from tools.bench import rows
from tools.reproduce.compare_precisions import FIRST_SEED, cards, folder_of

START = "start"
SCRIPTS = {"sft": "examples.sft.train", "dpo": "examples.rlhf.dpo"}
COURSES = {
    "sft": "--lr 1e-5 --train-iters 60 --lr-warmup-iters 6 --seq-length 1024 --long-rows drop --micro-batch-size 8 --global-batch-size 8 "
    "--valid-rows 99",
    "dpo": "--lr 5e-6 --train-iters 60 --lr-warmup-iters 6 --seq-length 1024 --long-rows drop --micro-batch-size 4 --global-batch-size 8 "
    "--valid-rows 60",
}
MEASURES = ("own_loss", "own_accuracy", "bf16_loss", "bf16_accuracy")
COLUMNS = ("task", "case", "seed", *MEASURES)
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a task of `SCRIPTS`, a case (recipe and flags, or `START`), and a seed."""

    task: str
    case: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.task}_{folder_of(self.case)}_{self.seed}"


def case(text: str) -> str:
    """Return `text` if it is a recipe with flags of the examples; an argparse type.

    Raises:
        argparse.ArgumentTypeError: the text is empty or begins with a flag.
    """
    words = shlex.split(text)
    if not words or words[0].startswith("-"):
        raise argparse.ArgumentTypeError(f"case {text!r}: begin with a recipe, such as 'O2 --moment-rounding stochastic'")
    return text


def words_of(job: Job, options: argparse.Namespace) -> list[str]:
    """Return the command line of a job for its script."""
    recipe, *flags = shlex.split("O0" if job.case == START else job.case)
    given = f"{COURSES[job.task]} {getattr(options, f'{job.task}_flags')}"
    where = ["--load", str(options.load), "--data", str(getattr(options, job.task)), "--save", str(options.out / job.name / "run")]
    return [*where, "--opt-level", recipe, "--seed", str(job.seed), *shlex.split(given), *flags]


def perform(job: Job, options: argparse.Namespace) -> None:
    """Train, evaluate the trained layers and the BF16 export, and write result.json.

    Raises:
        RuntimeError: the training fails.
    """
    script, words, folder = importlib.import_module(SCRIPTS[job.task]), words_of(job, options), options.out / job.name
    result: Result = {"task": job.task, "case": job.case, "seed": job.seed} | dict.fromkeys(MEASURES)
    if job.case != START:
        if code := script.main(words):
            raise RuntimeError(f"{SCRIPTS[job.task]} {shlex.join(words)} failed with {code}")
        last = json.loads((folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        result |= {"own_loss": last["valid_loss"], "own_accuracy": last.get("valid_accuracy")}
    exported = options.load if job.case == START else folder / "run" / saved.MODEL
    result |= {f"bf16_{name}": value for name, value in judge(job.task, script, words, exported).items()}
    shutil.rmtree(folder / "run", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "result.json.partial"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(folder / "result.json")


def judge(task: str, script: Any, words: Sequence[str], folder: Path) -> dict[str, float | None]:
    """Return the held-out `loss` and, for DPO, `accuracy` of the model in a folder, in BF16 layers of transformers."""
    args = script.parse(words)
    tokenizer = models.load_tokenizer(args.load)
    chat.use_template(tokenizer, args.chat_template)
    _, held_out = script.read(args, tokenizer)
    model = models.load_model(folder, "AutoModelForCausalLM", torch.bfloat16, args.device)
    if task == "sft":
        return {"loss": script.judge(model, held_out, args, tokenizer.pad_token_id)}
    reference = models.load_model(args.load, "AutoModelForCausalLM", torch.bfloat16, args.device)
    judged = script.judge(model, reference, held_out, args, tokenizer.pad_token_id)
    return {"loss": judged["valid_loss"], "accuracy": judged["valid_accuracy"]}


def complete(job: Job, options: argparse.Namespace) -> bool:
    """Return whether a job's result exists."""
    return (options.out / job.name / "result.json").is_file()


def run_all(jobs: Sequence[Job], options: argparse.Namespace, argv: Sequence[str], end: float) -> None:
    """Run each job in its own process, `--at-once` per GPU, until `end`, a value of `time.monotonic`."""
    free: SimpleQueue[str] = SimpleQueue()
    for card in cards() * options.at_once:
        free.put(card)

    def one(job: Job) -> None:
        card = free.get()
        try:
            if complete(job, options) or time.monotonic() >= end:
                return
            folder = options.out / job.name
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
            folder.mkdir(parents=True)
            command = [sys.executable, "-m", "tools.reproduce.compare_tuning", *argv, "--only", job.task, job.case, str(job.seed)]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": card}
            limit = None if math.isinf(end) else end - time.monotonic()
            with (folder / "log.txt").open("w", encoding="utf-8") as log:
                try:
                    done = subprocess.run(
                        command, cwd=rows.ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=limit
                    )
                except subprocess.TimeoutExpired:
                    print(f"{job.name}: stopped at the end of --minutes", flush=True)
                    return
            print(f"{job.name}: " + (f"failed with {done.returncode}, see {folder}/log.txt" if done.returncode else "done"), flush=True)
        finally:
            free.put(card)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(one, jobs))


def write(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Write tuning.csv, and print the mean over the seeds of every case."""
    where = rows.machine(options.commit)
    results = [json.loads((options.out / job.name / "result.json").read_text(encoding="utf-8")) for job in jobs]
    lines = [where | {key: "" if result[key] is None else result[key] for key in COLUMNS} for result in results]
    rows.write(options.out / "tuning.csv", [*where, *COLUMNS], lines)
    print("| task | case | seeds | " + " | ".join(MEASURES) + " |", "|" + " --- |" * (3 + len(MEASURES)), sep="\n")
    for task, name in dict.fromkeys((result["task"], result["case"]) for result in results):
        group = [result for result in results if (result["task"], result["case"]) == (task, name)]
        means = ["" if group[0][key] is None else f"{statistics.fmean(result[key] for result in group):.4f}" for key in MEASURES]
        print(f"| {task} | {name} | {len(group)} | " + " | ".join(means) + " |")


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table of the complete runs; return 1 if some are incomplete."""
    parser = Parser(description=__doc__)
    parser.add_argument("--load", required=True, type=path, help="chat model, a folder written by save_pretrained")
    parser.add_argument("--sft", type=path, help="conversations; without them no fine-tuning")
    parser.add_argument("--dpo", type=path, help="preferences; without them no DPO")
    parser.add_argument("--out", type=path, default=Path("runs/tuning"))
    parser.add_argument("--cases", nargs="+", type=case, default=["O0", "O2", "O3"], metavar="'RECIPE FLAGS'")
    parser.add_argument("--seeds", type=count(1), default=3, help="seeds per case (default: %(default)s)")
    parser.add_argument("--at-once", type=count(1), default=1, help="runs that share a GPU (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes (default: no limit)")
    parser.add_argument("--sft-flags", default="", help="more flags of examples/sft/train.py, for every run")
    parser.add_argument("--dpo-flags", default="", help="more flags of examples/rlhf/dpo.py, for every run")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    parser.add_argument("--only", nargs=3, metavar=("TASK", "CASE", "SEED"), help="internal: perform one run in this process")
    options = parser.parse_args(argv)
    for name in ("load", "sft", "dpo", "out"):  # the runs start in the root of the repository
        if (given := getattr(options, name)) is not None:
            setattr(options, name, given.resolve())
    tasks = [task for task in SCRIPTS if getattr(options, task) is not None]
    if not tasks:
        parser.error("neither --sft nor --dpo is given: name the data of at least one")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: give a number above 0, or omit it for no limit")
    if options.only:
        task, name, seed = options.only
        perform(Job(task=task, case=name, seed=int(seed)), options)
        return 0
    jobs = [Job(task=task, case=START, seed=FIRST_SEED) for task in tasks]
    jobs += [
        Job(task=task, case=name, seed=FIRST_SEED + n) for n in range(options.seeds) for task in reversed(tasks) for name in options.cases
    ]
    run_all(jobs, options, forwarded(options), time.monotonic() + 60 * options.minutes)
    done = [job for job in jobs if complete(job, options)]
    if done:
        write(done, options)
    if missing := [job.name for job in jobs if job not in done]:
        print("missing: " + ", ".join(missing))
    return int(bool(missing))


def forwarded(options: argparse.Namespace) -> list[str]:
    """Return the part of the command line that a run needs, with absolute paths."""
    words = [f"--load={options.load}", f"--out={options.out}", f"--sft-flags={options.sft_flags}", f"--dpo-flags={options.dpo_flags}"]
    return words + [f"--{task}={getattr(options, task)}" for task in SCRIPTS if getattr(options, task) is not None]


if __name__ == "__main__":
    sys.exit(main())
