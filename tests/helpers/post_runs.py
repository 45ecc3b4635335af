"""Tiny chat models, and the examples as modules."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def example(path: str, *, wants_transformers: bool = True) -> ModuleType:
    """A file below `examples/`; where it wants transformers, the test is skipped without."""
    if wants_transformers:
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("example_" + path.replace("/", "_").removesuffix(".py"), ROOT / "examples" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toy(folder: Path, **settings: Any) -> Path:
    """A folder with the model of `examples/toy_chat.py`."""
    example("toy_chat.py").make(folder, **settings)
    return folder
