"""Train the same small GPT twice on this machine, in BF16 (O0) and at O2, and compare the two.

    msamp quickstart [--iters N] [--processes N] [--out runs/quickstart]            in a checkout: make quickstart

It requires matplotlib (extra `plot`). It prepares real text and a tokenizer from pinned packages, downloaded once; trains, evaluates,
and writes report.html with its plots. The exit code is 1 if O2's final loss differs from BF16's by
more than 1 %, or if the model learned too little.
"""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.lm.errors import RunStopped
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.tools.report import Run, read_run, summary, write_report

LEVELS = ("O0", "O2")
ITERATIONS = 120
MAX_DIFFERENCE = 0.01  # between the validation losses of O2 and O0, relative
MIN_GAIN = 0.1  # how far the validation loss must be below the unigram entropy, relative
RECORD = "precision.jsonl"  # written at the levels with FP8
MARKER = "command.txt"  # only folders that contain it are emptied

MODEL = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
OPTIMIZER = "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
BATCH = 16  # sequences per iteration, over all processes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Values of the command line."""

    iters: int
    processes: int
    out: Path
    data: Path


def training_flags(level: str, options: Options) -> list[str]:
    """Return the flags of `msamp pretrain` for one level.

    Raises:
        ValueError: the processes do not divide the batch, or there are no iterations.
    """
    from msamp.numerics import recipe  # torch, for seconds

    if options.processes < 1 or BATCH % options.processes:
        raise ValueError(f"--processes {options.processes} must divide the batch of {BATCH} sequences: give 1, 2, 4, 8 or 16")
    if options.iters < 1:
        raise ValueError(f"--iters {options.iters} must be at least 1 (default: {ITERATIONS})")
    iters, folder = options.iters, options.out / level
    return [
        *MODEL.split(),
        *OPTIMIZER.split(),
        *f"--opt-level {level} --fp8-min-gain 0 --seed 1234 --train-iters {iters} --lr-warmup-iters {iters // 10}".split(),
        *f"--micro-batch-size {min(8, BATCH // options.processes)} --global-batch-size {BATCH}".split(),
        *f"--eval-interval {iters if iters % 4 else iters // 4} --eval-iters 16".split(),
        *f"--log-interval {max(1, iters // 30)}".split(),
        *("--train-data-path", str(options.data / "train_text_document")),
        *("--valid-data-path", str(options.data / "valid_text_document")),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(options.data / "tokenizer.json")),
        *(["--record-precision", str(folder / RECORD), "--record-interval", str(max(1, iters // 10))] if recipe.by_name(level).fp8 else []),
        *("--metrics-file", str(folder / "metrics.jsonl"), "--tensorboard-dir", str(folder / "tensorboard")),
        *("--save", str(folder / "checkpoint")),
    ]


def verdict(base: Run, other: Run, entropy: float) -> list[str]:
    """Return what is wrong with the two runs; an empty list if nothing is."""
    losses = {run.name: run.final_valid_loss for run in (base, other)}
    missing = [name for name, loss in losses.items() if loss is None]
    if missing:
        return [f"{' and '.join(missing)} was never evaluated"]
    left, right = losses[base.name] or 0.0, losses[other.name] or 0.0
    problems = []
    if not abs(right - left) <= MAX_DIFFERENCE * left:
        problems.append(f"the losses of {other.name} and of {base.name} differ by more than {100 * MAX_DIFFERENCE:g} %")
    problems += [
        f"the loss of {name} is not {100 * MIN_GAIN:g} % below the unigram entropy: train longer (--iters)"
        for name, loss in ((base.name, left), (other.name, right))
        if not loss <= (1 - MIN_GAIN) * entropy
    ]
    return problems


def run(command: Sequence[str], threads: int) -> None:
    """Run a command, and show its output as it comes.

    Raises:
        RunStopped: it failed. An interrupted command is ended.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        process.wait()
    finally:
        process.terminate()  # torchrun ends its workers
        process.wait()
    if process.returncode:
        raise RunStopped(f"exit code {process.returncode} from: {shlex.join(command)}")


def check_own(folder: Path) -> None:
    """Raise a ValueError if `folder` contains anything but an earlier quick start."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ValueError(f"{folder} contains files that no earlier quick start wrote: choose another --out")


def fresh(folder: Path) -> None:
    """Make `folder` an empty folder; ValueError as `check_own`."""
    check_own(folder)
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def train_all(options: Options) -> list[Run]:
    """Train both levels."""
    threads = max(1, (os.cpu_count() or 1) // options.processes)
    torchrun = [sys.executable, "-m", "megatron.lm.shell.torchrun", "--standalone", "--nproc-per-node", str(options.processes)]
    commands = {level: [*torchrun, "-m", "megatron.lm.pretrain", *training_flags(level, options)] for level in LEVELS}
    for level in LEVELS:
        fresh(options.out / level)
        (options.out / level / MARKER).write_text(shlex.join(commands[level]) + "\n", encoding="utf-8")
    for level, command in commands.items():
        say(f"training at {level}: {options.iters} iterations on {options.processes} processes")
        run(command, threads)
    return [read_run(level, options.out / level / "metrics.jsonl") for level in LEVELS]


def say(text: str) -> None:
    """Announce a step."""
    print(f"\n== {text}", flush=True)


def quickstart(options: Options) -> int:
    """Run all steps; return 0, or 1 if the verdict names a problem."""
    training_flags(LEVELS[0], options)  # bad values are refused before anything is downloaded
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the report requires matplotlib, which is not installed: pip install matplotlib")
    for level in LEVELS:
        check_own(options.out / level)
    say("text and tokenizer")
    run([sys.executable, "-m", "megatron.lm.tools.prepare_text", "quickstart", "--out", str(options.data)], threads=os.cpu_count() or 1)
    runs = train_all(options)
    meta = json.loads((options.data / "meta.json").read_text(encoding="utf-8"))
    entropy = meta["unigram_entropy_nats"]
    problems = verdict(runs[0], runs[1], entropy)
    page = write_report(runs, options.out, meta=meta, problems=problems)
    lines = [*summary(runs, entropy), *([f"FAILED: {problem}" for problem in problems] or ["PASS"])]
    (options.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    say("result")
    print(*lines, f"report: {page}", *(f"plot:   {path}" for path in sorted(options.out.glob("*.png"))), sep="\n")
    return 1 if problems else 0


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a run failed or the verdict names a problem, else the codes of `megatron.lm.shell.exit_codes`."""
    parser = Parser(description=__doc__)
    parser.add_argument("--iters", type=count(1, 10**6), default=ITERATIONS, help="training iterations of each run (default: %(default)s)")
    parser.add_argument("--processes", type=count(1, BATCH), help="processes to train with (default: 2, or the number of GPUs if smaller)")
    parser.add_argument(
        "--out", type=path, default=Path("runs/quickstart"), help="folder for the runs and the report (default: %(default)s)"
    )
    parser.add_argument("--data", type=path, default=Path("data/quickstart"), help="folder for text and tokenizer (default: %(default)s)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a kill, like Ctrl-C, ends the training processes too
    started = time.monotonic()
    import torch  # for seconds, after the flags

    processes = args.processes or (min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2)
    code = quickstart(Options(iters=args.iters, processes=processes, out=args.out.resolve(), data=args.data.resolve()))
    print(f"took:   {time.monotonic() - started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
