"""The command lines of tools, and the values that they take, as the `type` of an argument: what could not serve is refused first."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.lm.errors import report


class Parser(argparse.ArgumentParser):
    """A tool's command line: its docstring as it is written, and errors in one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**({"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs))

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's; a word that is no UTF-8 is refused, as the trainer refuses it, for it could not be printed or kept in JSON."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            try:
                word.encode()
            except UnicodeEncodeError:
                self.error(f"{word!a} is no text in UTF-8: give it, or the file, another name")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        report(f"error: {message} (--help lists the flags)", message)
        self.exit(2)


def count(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number from `low` to `high`."""

    def judged(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: give {low} to {high}")
        return value

    return judged


def name(text: str) -> str:
    """A word; an empty one, which an unset variable of the shell gives, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: is a variable of the shell unset?")
    return text


def path(text: str) -> Path:
    """A file or folder; an empty one is refused."""
    return Path(name(text))


def output_file(text: str) -> Path:
    """A file to write when all work is done: what could not be written then is refused now."""
    found = path(text)
    try:
        if found.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
        above = next(folder for folder in found.absolute().parents if folder.exists())
        if not above.is_dir():
            raise argparse.ArgumentTypeError(f"{text} lies below {above}, which is a file: name another place")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}): name another file") from None
    return found
