"""Flags that fine-tuning, DPO and PPO share."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.lm.post import conversations, models, packing
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


def data(parser: argparse.ArgumentParser, what: str, *, unit: str, in_batch: str, micro_batch: int, global_batch: int) -> None:
    """Add the flags of supervised data.

    Args:
        what: the rows of the file, such as "preferences".
        unit: what --long-rows judges and --valid-rows counts.
        in_batch: what the batch sizes count.
        micro_batch: default of --micro-batch-size.
        global_batch: default of --global-batch-size.
    """
    add = parser.add_argument
    add("--data", required=True, type=arguments.path, help=f"{what}, JSON or JSON lines")
    add("--seq-length", type=arguments.count(8), default=1024, help="tokens per sequence (default: %(default)s)")
    add(
        "--long-rows",
        default="refuse",
        choices=packing.LONG,
        help=f"what to do with {unit} over --seq-length (default: %(default)s)",
    )
    add("--micro-batch-size", type=arguments.count(1), default=micro_batch, help=f"{in_batch} per micro-batch (default: %(default)s)")
    add("--global-batch-size", type=arguments.count(1), default=global_batch, help=f"{in_batch} per step (default: %(default)s)")
    add("--valid-rows", type=arguments.count(0), default=0, help=f"{unit} at the end of the file held out for validation (default: 0)")


def check_multiple(parser: argparse.ArgumentParser, args: argparse.Namespace, part: str) -> None:
    """Exit with an error unless --global-batch-size is a multiple of `part`, a flag's destination."""
    whole, size = args.global_batch_size, getattr(args, part)
    if whole % size:
        parser.error(f"--global-batch-size {whole} is not a multiple of --{part.replace('_', '-')} {size}")


def training_rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of --data and how many of them are for training; the last --valid-rows are held out.

    Raises:
        ValueError: as `conversations.rows`, or if no row is left for training.
    """
    given = conversations.rows(args.data)
    if args.valid_rows >= len(given):
        raise ValueError(f"--valid-rows {args.valid_rows} of {len(given)} rows leaves no training data: give less than {len(given)}")
    return given, len(given) - args.valid_rows


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
