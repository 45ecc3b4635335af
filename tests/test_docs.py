"""What the guide says exists: paths, names of msamp, links and headings."""

import re
import unicodedata
from pathlib import Path

import msamp

ROOT = Path(__file__).parents[1]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
MADE = "docs/_build/"  # what `make docs` writes
PREDECESSOR = "MS-AMP"  # also imported as msamp: a column of a table with this heading holds its names, not ours
FOLDERS = ("msamp/", "megatron/", "tools/", "tests/", "examples/", "docs/")


def _code(text: str) -> list[str]:
    """What stands in code font or in a code block."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))]


def _ours(text: str) -> str:
    """The text without the columns of tables that hold the predecessor's names."""
    lines, foreign = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            foreign = None
        else:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            foreign = [cell == PREDECESSOR for cell in cells] if foreign is None else foreign
            line = "|" + "|".join(" " if theirs else cell for cell, theirs in zip(cells, foreign, strict=True)) + "|"
        lines.append(line)
    return "\n".join(lines)


def _headings(text: str) -> set[str]:
    """Anchors of the headings, as MyST makes them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", plain, re.MULTILINE)}


def _anchor(heading: str) -> str:
    kept = "".join(c for c in unicodedata.normalize("NFKC", heading.lower()) if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")


def problems(page: Path, root: Path = ROOT) -> list[str]:
    """What a page names that does not exist."""
    text, found = page.read_text(encoding="utf-8"), []
    for part in _code(_ours(text)):
        for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})[\w./-]*\w)", part):
            if not (root / path).exists() and not path.startswith(MADE) and not re.search(r"[A-Z]{5}", path):  # PAPER is a placeholder
                found.append(f"{path} does not exist")
        for name in re.findall(r"(?<![\w./-])(msamp(?:\.[A-Za-z_]\w*)+)", part):
            if not _exists(name):
                found.append(f"{name} does not exist")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        linked = (page.parent / target).resolve() if target else page
        if not linked.is_file():
            found.append(f"link to {target} leads nowhere")
        elif anchor and anchor not in _headings(linked.read_text(encoding="utf-8")):
            found.append(f"{linked.name} has no heading {anchor}")
    return found


def _exists(name: str) -> bool:
    """An attribute reached from the package, or a module of it."""
    first, *rest = name.split(".")[1:]
    if (ROOT / name.replace(".", "/")).is_dir() or (ROOT / (name.replace(".", "/") + ".py")).is_file():
        return True
    held = getattr(msamp, first, None)
    for part in rest:
        if held is None:
            break
        held = getattr(held, part, None)
    if held is not None:
        return True
    *folders, last = name.split(".")
    module = ROOT / ("/".join(folders) + ".py")
    return module.is_file() and re.search(rf"^(class|def) {last}\b", module.read_text(encoding="utf-8"), re.MULTILINE) is not None


def test_pages_name_only_what_exists() -> None:
    assert [
        f"{page.name}: {problem}" for page in [*GUIDE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"] for problem in problems(page)
    ] == []


def test_the_guide_stays_short() -> None:
    words = sum(bool(re.search(r"\w", word)) for page in GUIDE for word in page.read_text(encoding="utf-8").split())
    assert len(GUIDE) <= 20
    assert words <= 17_200
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^guide/(\w+)$", index, re.MULTILINE)) == {page.stem for page in GUIDE}
    captions = re.findall(r"^:caption: (.*)$", index, re.MULTILINE)
    assert len(captions) == len(set(captions))


def test_the_sidebar_has_at_most_40_entries_and_each_once() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [line for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in block.split() if "/" in line]
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for line in listed for page in (ROOT / "docs").glob(f"{line}.md")}
    assert len(pages) <= 40
    assert len(listed) == len(set(listed))


def test_every_claim_of_security_names_a_test_that_exists():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert not [path for path in re.findall(r"`(tests/[^`:]+)`", text) if not (ROOT / path).exists()]
    rows = [line for line in text.partition("## What is not trusted")[2].splitlines() if re.match(r"\| (?!---|what )", line)]
    named = {
        (path or re.search(r"`(tests/[^`]+)`", row)[1], name)
        for row in rows
        for path, name in re.findall(r"`(?:(tests/\S+)::)?(test_\w+)`", row)
    }
    assert {row for row in rows if "`test_" in row or "::test_" in row} == set(rows)
    assert not [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")]
