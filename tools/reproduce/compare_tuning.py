"""Tune a model by TRL at each level, rate and seed (`examples/trl_tuning.py`), several runs at once on each GPU; one CSV row per run.

    python tools/reproduce/compare_tuning.py --load smollm2 --sft alpaca_en_demo.json --dpo dpo_en_demo.json

O0 runs twice: from BF16 weights, of which small updates reach the layers late, and from FP32 weights under autocast, whose GEMMs round them
to BF16. fp32 rounds nothing: it tells what FP8 costs from what BF16's rounding of weights hides. All runs of a seed come before those of
the next. Runs that are on file are skipped, so the same command continues where a call was cut off.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Any

from examples import trl_tuning
from megatron.lm.shell import arguments, exit_codes
from tools.bench import rows
from tools.measurements import ROOT, read
from tools.reproduce.compare_precisions import cards

LEVELS = (("O0", "bf16"), ("O0", "fp32"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16"), ("fp32", "fp32"))
RATES = {"sft": ("1e-5", "5e-5"), "dpo": ("1e-6", "5e-6", "2e-5"), "grpo": ("1e-5",)}
FLAGS = {"sft": "--batch 16 --valid-rows 99", "dpo": "--batch 8 --valid-rows 100", "grpo": "--batch 64"}


def cases(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the words of each run."""
    for seed in range(1234, 1234 + args.seeds):
        for task in args.tasks:
            data = [] if task == "grpo" else ["--data", str(getattr(args, task))]
            for rate in RATES[task]:
                for level, dtype in LEVELS:
                    shared = {"--load": args.load, "--seq-length": args.seq_length, "--steps": args.steps, "--seed": seed, "--lr": rate}
                    words = [word for flag, value in shared.items() for word in (flag, str(value))]
                    yield [task, *data, *words, "--opt-level", level, "--dtype", dtype, *FLAGS[task].split(), *args.more]


def run(words: list[str], free: SimpleQueue[str]) -> dict[str, Any]:
    """Run in a process of its own, so that an error of CUDA ends with it, on a GPU of `free`."""
    card = free.get()
    try:
        command = [sys.executable, str(ROOT / "examples/trl_tuning.py"), *words]
        done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": card}, capture_output=True, text=True, check=False)
    finally:
        free.put(card)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@exit_codes.command
def main() -> int:
    parser = arguments.Parser(description=__doc__)
    add = parser.add_argument
    add("--load", type=arguments.path, required=True, help="transformers folder")
    add("--sft", type=arguments.path, help="conversations")
    add("--dpo", type=arguments.path, help="preferences")
    add("--tasks", nargs="+", choices=tuple(RATES), default=["sft", "dpo"], help="(default: %(default)s)")
    add("--seeds", type=arguments.count(1), default=3, help="(default: %(default)s)")
    add("--steps", type=arguments.count(1), default=60, help="(default: %(default)s)")
    add("--seq-length", type=arguments.count(8), default=768, help="(default: %(default)s)")
    add("--at-once", type=arguments.count(1), default=1, help="runs at a time on each GPU (default: %(default)s)")
    rows.add_flags(parser, None)
    add("--more", type=shlex.split, default=[], help="further flags of the example, in quotes")
    args = parser.parse_args()
    for task in args.tasks:
        if task != "grpo" and getattr(args, task) is None:
            parser.error(f"--tasks {task} needs --{task} FILE")
    path = args.csv or ROOT / "tools/reproduce/results/trl/tuning.csv"
    done = {tuple(row[name] for name in trl_tuning.SETTINGS) for row in read(str(path))} if path.is_file() else set()
    left, failed, machine = [], 0, rows.machine(args.commit)
    for words in cases(args):
        parsed = trl_tuning.parse(words)
        if tuple(str(getattr(parsed, name)) for name in trl_tuning.SETTINGS) not in done:
            left.append(words)
    slots, free = cards() * args.at_once, SimpleQueue[str]()
    for card in slots:
        free.put(card)
    with ThreadPoolExecutor(len(slots)) as pool:
        for future in as_completed([pool.submit(run, words, free) for words in left]):
            if (error := future.exception()) is not None:
                failed += 1
                print(f"failed: {error}", flush=True)
                continue
            rows.append(path, [machine | future.result()])
            print(future.result(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
