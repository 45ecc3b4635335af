"""Command lines of tools, and `type` functions of their arguments, which refuse invalid values before any work."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron.lm.errors import report


class Parser(argparse.ArgumentParser):
    """The argument parser of a tool: it prints the docstring unchanged, and errors in one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**({"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs))

    def error(self, message: str) -> NoReturn:
        message = f"{message} ({self.prog} --help lists the flags)"
        report(f"error: {message}", message)
        self.exit(2)


def count(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type for an integer from `low` to `high`."""

    def judged(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: give {low} to {high}")
        return value

    return judged


def name(text: str) -> str:
    """Argument type of a non-empty string; it refuses an empty one, as from an unset shell variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty: a shell variable may be unset")
    return text


def path(text: str) -> Path:
    """Argument type of a file or folder; it refuses an empty string."""
    return Path(name(text))


def output_file(text: str) -> Path:
    """Argument type of a file that is written at the end; it refuses a file that could not be written."""
    file = path(text)
    try:
        if file.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder: give a file in it")
        above = next(folder for folder in file.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"{text} is below {above}, which is a file or cannot be written: choose another path")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}): choose another file") from None
    return file
