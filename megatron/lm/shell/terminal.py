"""Lines for people: coloured on a terminal, plain text in a file or a pipe, at most 120 columns wide."""

import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from megatron.lm.shell.streams import escaped, unfiltered

WIDTH = 120
SEPARATOR = "  "


class Part(NamedTuple):
    """One field of a line.

    Attributes:
        text: what is printed.
        style: its color on a terminal, a style of rich; "" is the default.
        rank: if the line is wider than `WIDTH`, fields of the highest rank are left out first; 0 is always kept.
    """

    text: str
    style: str = ""
    rank: int = 0


def fitted(parts: Sequence[Part], width: int = WIDTH) -> list[Part]:
    """Return the parts that fit into `width` columns including separators, in their order."""
    kept = list(parts)
    while sum(len(part.text) for part in kept) + len(SEPARATOR) * (len(kept) - 1) > width and any(part.rank for part in kept):
        kept.remove(max(kept, key=lambda part: part.rank))
    return kept


def wrapped(text: str) -> str:
    """Wrap `text` to lines of at most `WIDTH` columns with a hanging indent; longer words, such as paths, are not broken."""
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def show(parts: Sequence[Part], stream: TextIO | None = None) -> None:
    """Print one line of `parts` to `stream` (default: stdout). rich respects NO_COLOR and TERM=dumb."""
    stream = sys.stdout if stream is None else stream
    if not (stream.isatty() and _show_in_colour(parts, stream)):
        print(SEPARATOR.join(part.text for part in parts), file=stream, flush=True)


def _show_in_colour(parts: Sequence[Part], stream: TextIO) -> bool:
    """Return whether the line was printed: without rich, as on a GPU image that was built by hand, the caller prints plain text."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return False
    text = Text(SEPARATOR).join(Text(escaped(part.text), part.style) for part in parts)
    Console(file=unfiltered(stream), highlight=False, emoji=False).print(text, soft_wrap=True)
    stream.flush()
    return True
