"""What tests of refusals share: good flags of the trainer, what is refused beside them, and how a command refuses.

refusals.assert_refused("--hidden-size 66", "--hidden-size 66 is not divisible by")
"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

import pytest

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.config.whole import Rules

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


Refusal = tuple[str, str] | tuple[str, str, int]  # flags, regular expression of the message, processes (1)


def config(flags: str = "") -> Config:
    """Of `flags` beside and over the good ones."""
    return parse_args(shlex.split(f"{GOOD} {flags}"))


def assert_refused(flags: str, message: str, world_size: int = 1) -> None:
    """That a line of the refusal begins with, or holds, the message."""
    with pytest.raises(ValueError, match=f"(?m){message}"):
        check(config(flags), world_size)


def proof(rules: Rules, refusals: Sequence[Refusal]) -> tuple[Callable[..., None], Callable[[], None]]:
    """Two tests of a file of rules: that each refusal names value and fix, and that every rule has one."""

    @pytest.mark.parametrize("refusal", refusals, ids=str)
    def refused(refusal: Refusal) -> None:
        assert_refused(*refusal)

    def proved() -> None:
        assert fired(rules, refusals) == set(rules)

    return refused, proved


def fired(rules: Rules, refusals: Iterable[Refusal]) -> set:
    """Those of the rules that have something to say of the flags."""
    found = set()
    for flags, message, *processes in refusals:
        settings = config(flags)
        for rule in rules:
            try:
                found |= {rule} if any(re.search(message, text) for text in rule(settings, *(processes or [1]))) else set()
            except (ValueError, ZeroDivisionError):  # a rule on values that `check` would have refused before it
                continue
    return found
