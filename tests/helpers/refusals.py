"""Good flags of the trainer, which tests of refusals vary, and how a command refuses."""

import shlex
from collections.abc import Callable

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3 "
    "--data-path corpus --tokenizer-type NullTokenizer --vocab-size 100"
)


def code(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of a command, whether argparse refuses or the command itself."""
    try:
        return main(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def config(flags: str = "") -> Config:
    """Of `flags` beside and over the good ones."""
    return parse_args(shlex.split(f"{GOOD} {flags}"))
