"""The python blocks of a page of the guide: whole programs, and fragments that take names from their reader.

A comment above a fragment says which: `<!-- takes: model, rows -->`.
"""

import re
from pathlib import Path
from typing import NamedTuple

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
_BLOCK = re.compile(r"(?:^<!-- takes: (?P<takes>[\w, ]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block, the heading that it stands below, and the names that it takes; none of a whole program."""

    heading: str
    code: str
    takes: tuple[str, ...]


def blocks(page: str) -> list[Block]:
    """Those of a page, in its order."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        heading = re.findall(r"^#+ (.+)$", text[: match.start()], re.MULTILINE)[-1]
        takes = tuple(name.strip() for name in (match["takes"] or "").split(",") if name.strip())
        found.append(Block(heading, match["code"], takes))
    return found
