"""Tiny chat models for tests of fine-tuning and RLHF, and the examples as modules."""

import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import refusals

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def example(path: str, *, wants_transformers: bool = True) -> ModuleType:
    """A file below `examples/`; where it wants transformers, the test is skipped without."""
    if wants_transformers:
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("example_" + path.replace("/", "_").removesuffix(".py"), ROOT / "examples" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toy(folder: Path, **settings: Any) -> Path:
    """A folder with the model of `examples/toy_chat.py`."""
    example("toy_chat.py").make(folder, **settings)
    return folder


def sums(file: Path, count: int = 24) -> Path:
    """Questions and answers of one sum each, as JSON lines."""
    rows = [{"instruction": f"{n % 9}+{n // 9}=", "output": f"it is {n % 9 + n // 9}"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def assert_refused(run: Callable[[], int], folder: Path, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """That a command refuses in one line with a regular expression, exits with 2, and writes nothing to the folder of its run."""
    refusal = (refusals.code(lambda _: run(), []), capsys.readouterr().err.strip())
    assert (refusal[0], refusal[1].count("\n")) == (2, 0), refusal
    assert re.search(message, refusal[1])
    assert not folder.exists()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Of a run, without what a clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in found]
