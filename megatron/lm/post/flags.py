"""The flags that fine-tuning, DPO and PPO have in common."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.lm.post import models
from megatron.lm.shell import arguments
from msamp.numerics.stochastic_rounding import ROUNDINGS

UNTOLD = frozenset({"save_interval", "log_interval", "rows", "commit", "save", "no_checkpoints", "device"})  # change no number


def common(parser: argparse.ArgumentParser, *, lr: float, train_iters: int) -> None:
    """Add them, with these defaults."""
    add = parser.add_argument
    add("--load", required=True, type=arguments.path, help="folder of the model, as save_pretrained writes it")
    add("--save", required=True, type=arguments.path, help="folder of the run: checkpoints, metrics and the finished model")
    add("--opt-level", default="O2", help="O0 (BF16), O1, O2, O3, or another recipe (default: %(default)s)")
    add("--dtype", default="bf16", choices=models.DTYPES, help="of the model before the recipe (default: %(default)s)")
    add("--master-rounding", choices=ROUNDINGS, help="how master weights are rounded when they are stored (default: the recipe's)")
    add("--moment-rounding", choices=ROUNDINGS, help="how Adam's moments are rounded when they are stored (default: the recipe's)")
    add("--chat-template", type=arguments.path, help="a Jinja text, in place of the tokenizer's own")
    add("--train-iters", type=arguments.count(1), default=train_iters, help="steps (default: %(default)s)")
    add("--lr", type=float, default=lr, help="at its highest; a cosine to 0 follows (default: %(default)s)")
    add("--lr-warmup-iters", type=arguments.count(0), default=0, help="steps in which it rises (default: %(default)s)")
    add("--weight-decay", type=float, default=0.0, help="decoupled (default: %(default)s)")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0 does not clip (default: %(default)s)")
    add("--seed", type=arguments.count(0), default=1234, help="of all that is drawn (default: %(default)s)")
    add("--save-interval", type=arguments.count(1), default=100, help="steps between checkpoints (default: %(default)s)")
    add("--log-interval", type=arguments.count(1), default=10, help="steps between lines on the screen (default: %(default)s)")
    add("--no-checkpoints", action="store_true", help="keep metrics alone, neither checkpoints nor the model: to measure memory and speed")
    add("--rows", type=arguments.output_file, help="append losses, memory and speed to this CSV file")
    add("--commit", type=arguments.name, help="hash to record in --rows where the tree is not a git checkout")


def device(parser: argparse.ArgumentParser) -> torch.device:
    """Where a run of one process computes; ends the command where it is one of several."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("this loop is for one process: for several take msamp.integrations.transformers.Trainer")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def roundings(args: argparse.Namespace) -> dict[str, str]:
    """Return the rounding arguments of `msamp.initialize` that the command line gives; one that is not given is the recipe's."""
    given = {"master_rounding": args.master_rounding, "moment_rounding": args.moment_rounding}
    return {name: rounding for name, rounding in given.items() if rounding is not None}


def settings(args: argparse.Namespace, **others: Any) -> Mapping[str, Any]:
    """What a checkpoint remembers of a command line, and a resumed run must give again; `others` take the place of flags."""
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name not in UNTOLD}
    return kept | others
