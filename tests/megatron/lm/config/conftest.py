"""The folder in which flags are judged."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with a dataset, half a dataset, and an empty folder; nothing may appear in it."""
    for name in ("corpus.bin", "corpus.idx", "half.bin"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    yield
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx", "folder", "half.bin"]
