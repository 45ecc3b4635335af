"""Generate the page of promises from the markers on the tests that verify them.

A test declares its promise with `@pytest.mark.promise("Data", "Data that was moved or renamed is the same data.")`. `make tables` lists all
promises by section, each with the test's path, in `docs/reference/promises.md`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = "docs/reference/promises.md"
HEAD = """# Promises and their tests

What this project promises, by subject, and the test that verifies each promise. `make tables` generates this page from the marker `promise`
on the tests. [Which host supports what](hosts_matrix.md) lists the hosts in one table.
"""


class Promise(NamedTuple):
    """A sentence for users, its section, and its test in pytest's notation."""

    section: str
    text: str
    test: str


def promises(root: Path) -> list[Promise]:
    """Return all promises below `root/tests`, in the order of their files and lines.

    Raises:
        ValueError: a marker without exactly two literal strings, or a sentence that two tests promise.
    """
    all_promises: list[Promise] = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        name = file.relative_to(root).as_posix()
        all_promises += _marked(file, name)
    texts = [promise.text for promise in all_promises]
    for promise in all_promises:
        if texts.count(promise.text) > 1:
            raise ValueError(f"{promise.test} promises {promise.text!r}, and so does another test: mark only one of them")
    return all_promises


def _marked(file: Path, name: str) -> Iterator[Promise]:
    text = file.read_text(encoding="utf-8")
    if "pytest.mark.promise" not in text:
        return
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                words = [part.value for part in decorator.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                if len(words) != 2 or len(decorator.args) != 2:
                    raise ValueError(f"{name}:{decorator.lineno}: promise takes a section and a sentence, both literal strings")
                yield Promise(words[0], words[1], f"{name}::{function.name}")


def page(root: Path) -> str:
    """Return the whole page, with sections in alphabetical order."""
    by_section: dict[str, list[Promise]] = {}
    for promise in promises(root):
        by_section.setdefault(promise.section, []).append(promise)
    parts = [HEAD]
    for section in sorted(by_section):
        lines = [f"- {promise.text} `{promise.test}`" for promise in by_section[section]]
        parts.append(f"## {section}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)
