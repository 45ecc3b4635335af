"""Plain words in pages, docstrings, comments, help texts and messages: things are no persons, and parentheses hold no sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.lm.config.cli import _parser

ROOT = Path(__file__).parents[1]
PAGES = [  # SECURITY.md speaks of persons
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "docs/index.md")),
    *sorted(page for folder in ("guide", "promises", "results", "reproduction", "api") for page in (ROOT / "docs" / folder).glob("*.md")),
]
SOURCES = [
    *sorted(file for folder in ("msamp", "megatron", "tools", "examples") for file in (ROOT / folder).rglob("*.py")),
    ROOT / "docs/conf.py",
    ROOT / "setup.py",
]
# Pronouns of persons. A rank is "which", and a clause of "whose" is a sentence of its own.
PERSONS = re.compile(r"\b(who|whose|whom|whoever|nobody|everybody)\b", re.IGNORECASE)
LONGEST = 12  # words of a parenthesis: units and references


def persons(text: str) -> list[str]:
    """The lines that speak of things as of persons."""
    return [line.strip() for line in text.splitlines() if PERSONS.search(line)]


def long_parentheses(text: str) -> list[str]:
    """Parentheses of more than `LONGEST` words outside of code."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", " c ", text, flags=re.MULTILINE | re.DOTALL)
    return [part for part in re.findall(r"(?<!\])\(([^()]*)\)", text) if len(part.split()) > LONGEST]


def help_texts() -> Iterator[str]:
    """What the trainer's `--help` says of itself and of each flag."""
    parser = _parser({})
    yield parser.description or ""
    for group in parser._action_groups:
        yield group.description or ""
    for action in parser._actions:
        yield action.help or ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_plain_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert persons(text) == []
    assert long_parentheses(text) == []


def test_source_files_use_plain_words() -> None:
    found = {path.relative_to(ROOT).as_posix(): persons(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}, (
        "a rank, a tensor or a file is no person: write which, its or no rank"
    )


def test_help_texts_use_plain_words() -> None:
    texts = list(help_texts())
    assert len(texts) > 100
    assert [text for text in texts if persons(text) or long_parentheses(text)] == []


@pytest.mark.parametrize("text", ["the rank who waits", "tensors whose scale is lost", "Nobody reads it."])
def test_a_person_is_found(text: str) -> None:
    assert persons(text) == [text]


def test_a_long_parenthesis_is_found_and_a_reference_is_not() -> None:
    words = " ".join(["word"] * (LONGEST + 1))
    assert long_parentheses(f"a ({words}) b (FP8-LM, section 2.1, equations 3 to 6) [c](d) `f({words})`") == [words]
