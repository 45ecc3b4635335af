"""Flags that fine-tuning, DPO and PPO share."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.lm.post import models
from megatron.lm.shell import arguments
from msamp.numerics.stochastic_rounding import ROUNDINGS

UNTOLD = frozenset({"save_interval", "log_interval", "rows", "commit", "save", "no_checkpoints", "device"})  # do not change the results


def common(parser: argparse.ArgumentParser, *, lr: float, train_iters: int) -> None:
    """Add the shared flags, with these defaults."""
    add = parser.add_argument
    add("--load", required=True, type=arguments.path, help="folder of the model, as save_pretrained writes it")
    add("--save", required=True, type=arguments.path, help="folder of the run: checkpoints, metrics and the finished model")
    add("--opt-level", default="O2", help="O0 (BF16), O1, O2, O3, or another recipe (default: %(default)s)")
    add("--dtype", default="bf16", choices=models.DTYPES, help="of the model before the recipe (default: %(default)s)")
    add("--export-dtype", choices=models.DTYPES, help="of the finished model's weights, which come from the masters (default: --dtype)")
    add("--master-rounding", choices=ROUNDINGS, help="how master weights are rounded when they are stored (default: the recipe's)")
    add("--moment-rounding", choices=ROUNDINGS, help="how Adam's moments are rounded when they are stored (default: the recipe's)")
    add("--chat-template", type=arguments.path, help="a Jinja text, in place of the tokenizer's own")
    add("--train-iters", type=arguments.count(1), default=train_iters, help="steps (default: %(default)s)")
    add("--lr", type=float, default=lr, help="peak learning rate, followed by a cosine to 0 (default: %(default)s)")
    add("--lr-warmup-iters", type=arguments.count(0), default=0, help="warm-up steps of the learning rate (default: %(default)s)")
    add("--weight-decay", type=float, default=0.0, help="decoupled (default: %(default)s)")
    add("--clip-grad", type=float, default=1.0, help="maximum gradient norm; 0 does not clip (default: %(default)s)")
    add("--seed", type=arguments.count(0), default=1234, help="seed of all random numbers (default: %(default)s)")
    add("--save-interval", type=arguments.count(1), default=100, help="steps between checkpoints (default: %(default)s)")
    add("--log-interval", type=arguments.count(1), default=10, help="steps between log lines (default: %(default)s)")
    add("--no-checkpoints", action="store_true", help="save only metrics, no checkpoints and no model, to measure memory and speed")
    add("--rows", type=arguments.output_file, help="append losses, memory and speed to this CSV file")
    add("--commit", type=arguments.name, help="commit hash for --rows if the tree is not a git checkout")


def device(parser: argparse.ArgumentParser) -> torch.device:
    """Return the device of a single-process run; exit with an error if there are several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("this loop supports one process: for several use msamp.integrations.transformers.Trainer")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def roundings(args: argparse.Namespace) -> dict[str, str]:
    """Return the rounding arguments of `msamp.initialize` from the command line, without those that are not set (the recipe's apply)."""
    given = {"master_rounding": args.master_rounding, "moment_rounding": args.moment_rounding}
    return {name: rounding for name, rounding in given.items() if rounding is not None}


def settings(args: argparse.Namespace, **others: Any) -> Mapping[str, Any]:
    """Return the settings that a checkpoint records and a resumed run must repeat; `others` override flags."""
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name not in UNTOLD}
    return kept | others
