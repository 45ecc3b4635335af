"""Flag sets: of the trainer, which plans and starts nothing (or trains a step, where all numbers are small), and of the tools."""

import random
import shlex
from dataclasses import fields
from pathlib import Path

from attack import fuzz_files, odd
from attack.fuzz import Command

from helpers import tiny
from megatron.lm import pretrain
from megatron.lm.config import flag
from megatron.lm.config.cli import section_types
from megatron.lm.config.presets import PRESETS
from megatron.lm.tools import convert_checkpoint, inspect_scales, loss_compare, preprocess_data, report

GOOD = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--data-path corpus --micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 1 --split 80,15,5 --log-interval 1 "
    "--fp8-min-gain 0 --lr-warmup-iters 0"
)
SETTINGS = [setting for cls in section_types().values() for setting in fields(cls)]
TRAINED = 0.02  # share of the trainer's flag sets that are trained, where no number is large
PROCESSES = ("1", "1", "1", "1", "2", "3", "8", "1024", "10000000000", "0", "-1", "abc", "")
TOOLS = (
    (40, "loss_compare", loss_compare.main, "--base a=metrics.jsonl --other b=metrics.jsonl --max-rel 0.1 --window 3"),
    (30, "inspect_scales", inspect_scales.main, "precision.jsonl --most 3"),
    (
        4,
        "report",
        report.main,
        "--run a=metrics.jsonl --precision a=precision.jsonl --meta meta.json --sample a=text.txt --window 3 --out o/r",
    ),
    (
        25,
        "preprocess_data",
        preprocess_data.main,
        "--input text.jsonl --output-prefix o/data --tokenizer-type NullTokenizer --vocab-size 60 --workers 0",
    ),
    (
        15,
        "preprocess_data",
        preprocess_data.main,
        "--input text.txt --output-prefix o/data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --workers 0",
    ),
    (20, "convert_checkpoint", convert_checkpoint.main, "inspect --load checkpoint"),
    (20, "convert_checkpoint", convert_checkpoint.main, "to-hf --load checkpoint --output o/hf --dtype float32"),
    (10, "convert_checkpoint", convert_checkpoint.main, "export-fp8 --load checkpoint --output o/hf --tokenizer-type NullTokenizer"),
    (20, "convert_checkpoint", convert_checkpoint.main, "from-hf --load hf --output o/ours --make-vocab-size-divisible-by 32"),
)


def prepare(material: Path) -> None:
    """Sound files of every kind."""
    fuzz_files.prepare(material)


def case(draw: random.Random, material: Path, box: Path) -> list[Command]:
    """One flag set."""
    for path in material.iterdir():
        (box / path.name).symlink_to(path)
    if draw.random() < 0.65:
        return [_trainer(draw, box)]
    weights = [tool[0] for tool in TOOLS]
    _, name, main, line = draw.choices(TOOLS, weights)[0]
    last = ("--workers", "0") if name == "preprocess_data" else ()  # values before it are judged, and no process is started
    return [Command(name, main, [*_changed(shlex.split(line), draw), *last])]


def _trainer(draw: random.Random, box: Path) -> Command:
    argv, trained = list(GOOD), draw.random() < TRAINED
    if draw.random() < 0.15:
        argv = ["--preset", draw.choice(list(PRESETS)), *argv]
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5))):
        argv += _setting(draw)
    if draw.random() < 0.1:
        argv = _changed(argv, draw)
    large = any(word.strip("+-.").replace("_", "").isdecimal() and len(word) > 2 for word in argv)
    large |= "--preset" in argv and not any(word.startswith("--global-batch-size") for word in argv)  # a batch of a thousand sequences
    if trained and not large:
        # Nothing is dry: the flags that name places outside are left out, because the trainer would rightly go there.
        inside = [word for word in argv if not word.startswith(("/", "~", ".."))]
        return Command("pretrain", pretrain.main, [*inside, "--data-cache-path", "cache"], caches=("cache",))
    environment = {"WORLD_SIZE": draw.choice(PROCESSES), "RANK": draw.choice(("0", "0", "1", "x"))} if draw.random() < 0.3 else {}
    return Command("pretrain --dry-run", pretrain.main, [*argv, "--dry-run"], environment)


def _setting(draw: random.Random) -> list[str]:
    setting = draw.choice(SETTINGS)
    choices = setting.metadata["choices"]
    choices = choices() if callable(choices) else choices
    if "bool" in str(setting.type):
        return [flag(setting.name)]
    words = [
        odd.number(draw),
        odd.number(draw),
        draw.choice(odd.WORDS),
        draw.choice(odd.PATHS),
        *((choices and [draw.choice(choices)] * 4) or ()),
    ]
    many = "tuple" in str(setting.type)
    given = [draw.choice(words) for _ in range(draw.choice((0, 1, 2, 3)) if many else 1)]
    return [f"{flag(setting.name)}={given[0]}"] if given and draw.random() < 0.5 else [flag(setting.name), *given]


def _changed(argv: list[str], draw: random.Random) -> list[str]:
    """A command line with some of its words replaced, doubled or gone."""
    argv = list(argv)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        at = draw.randrange(len(argv))
        what = draw.randrange(8)
        if what == 0:
            del argv[at]
        elif what == 1:
            argv.insert(at, argv[at])
        elif what == 2:
            argv.insert(at, draw.choice(("--unknown", "--help", "-x", *odd.WORDS)))
        else:
            values = [i for i, word in enumerate(argv) if not word.startswith("--")]
            at = draw.choice(values) if values else at
            name, equals, _ = argv[at].partition("=")
            odd_one = draw.choice((odd.number(draw), draw.choice(odd.WORDS), draw.choice(odd.PATHS), draw.choice(odd.PATHS)))
            argv[at] = f"{name}={odd_one}" if equals and draw.random() < 0.8 else odd_one
        if not argv:
            break
    return argv


assert tiny.VOCABULARY == 60  # as GOOD says
