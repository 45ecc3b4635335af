"""Every table and figure of the papers, by name. To add one: an `Entry` in the module of its subject, and a function that returns its
findings."""

from collections.abc import Mapping
from types import MappingProxyType

from tools.reproduce import coat, collage, curves, exact, gradients, grids, post, slides, versions
from tools.reproduce.entry import Entry

_MODULES = (exact, grids, curves, collage, post, gradients, coat, slides, versions)
_PAPERS = ("fp8lm", "collage", "coat", "slides")


def _order(entry: Entry) -> tuple[int, str, int]:
    paper, _, rest = entry.name.partition("-")
    digits = "".join(character for character in rest if character.isdigit())
    return _PAPERS.index(paper), rest.rstrip("0123456789"), int(digits or 0)


def _all() -> dict[str, Entry]:
    entries = sorted((entry for module in _MODULES for entry in module.ENTRIES), key=_order, reverse=False)
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError(f"two entries have the same name: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return {entry.name: entry for entry in entries}


ENTRIES: Mapping[str, Entry] = MappingProxyType(_all())
