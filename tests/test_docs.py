"""What the guide says exists: flags, paths, names of msamp, links and headings."""

import argparse
import re
import unicodedata
from pathlib import Path

import pytest

import msamp
from megatron.lm.config.cli import _parser
from megatron.lm.config.megatron_flags.table import rows

ROOT = Path(__file__).parents[1]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
TOOLS = [path for folder in ("megatron/lm/tools", "megatron/lm/post", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
OTHERS = {  # flags of other people's commands, and of ours that argparse makes by itself
    "--model_args", "--include_path", "--metadata", "--tasks", "--limit", "--output_path",
    "--help", "--nproc-per-node", "--index-url", "--extra-index-url", "--nodes", "--ntasks-per-node", "--export", "--transformer-impl",
    "--time", "--signal", "--requeue", "--exclude", "--target", "--rm", "--gpus", "--shm-size", "--no-build-isolation",
    "--dist-ckpt-optim-fully-reshardable", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
}  # fmt: skip
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


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


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
    known = _flags(_parser({})) | OTHERS
    known |= {row.flag for row in rows()}
    for tool in TOOLS:
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', tool.read_text(encoding="utf-8")))
    for part in _code(_ours(text)):
        flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", part)
        found += [f"no parser has {flag}" for flag in flags if flag not in known and flag.replace("_", "-") not in known]
        for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})[\w./-]*\w)", part):
            if not (root / path).exists() and not path.startswith(MADE):
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


@pytest.mark.parametrize("page", [*GUIDE, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_a_page_names_only_what_exists(page: Path) -> None:
    assert problems(page) == []


def test_the_guide_stays_short() -> None:
    words = sum(bool(re.search(r"\w", word)) for page in GUIDE for word in page.read_text(encoding="utf-8").split())
    assert len(GUIDE) <= 22
    assert words <= 19_100
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


def quoted_messages(text: str) -> list[str]:
    """Code in the columns of tables whose heading speaks of messages."""
    found, column = [], -1
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = -1
        elif column < 0:
            column = next((i for i, cell in enumerate(cells) if cell.startswith(("message", "symptom"))), len(cells))
        elif column < len(cells):
            found += re.findall(r"^`([^`]+)`$", cells[column])
    return found


def test_a_quoted_message_is_in_the_source() -> None:
    files = [path for top in ("msamp", "megatron", "examples") for kind in ("py", "sh") for path in (ROOT / top).rglob(f"*.{kind}")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    source = re.sub(r'"\n\s+f?"', "", source)  # a literal that is continued on the next line
    quoted = {page.name: quoted_messages(page.read_text(encoding="utf-8")) for page in GUIDE}
    assert sum(map(len, quoted.values())) > 10
    assert {name: lost for name, found in quoted.items() if (lost := [text for text in found if text not in source])} == {}


def test_every_claim_of_security_names_a_test_that_exists():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    rows = [line for line in text.partition("## What is not trusted")[2].splitlines() if re.match(r"\| (?!---|what )", line)]
    assert rows
    assert not [row for row in rows if "`tests/" not in row]
