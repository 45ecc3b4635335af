from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.assertion import rewrite

from helpers import rewritten


def test_processes_share_the_files(tmp_path: Path):
    files = [tmp_path / folder / f"test_{i}.py" for folder in "ab" for i in range(4)]
    for file in [*files, tmp_path / "a/conftest.py"]:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    parts = [rewritten.part(SimpleNamespace(workerinput={"workerid": f"gw{i}", "workercount": 3}), tmp_path) for i in range(3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert rewritten.part(SimpleNamespace(), tmp_path) == []


@pytest.mark.parametrize("written", [True, False])
def test_pytest_finds_what_was_kept(tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, written: bool):
    monkeypatch.setattr("sys.dont_write_bytecode", not written)
    monkeypatch.setattr(rewrite, "get_cache_dir", lambda file: tmp_path / "kept")
    file = tmp_path / "test_one.py"
    file.write_text("def test_one():\n    assert 1 == 2\n")
    rewritten.keep([file], pytestconfig)
    (kept,) = [rewrite._read_pyc(file, tmp_path / "kept" / f"test_one{rewrite.PYC_TAIL}")]
    assert (kept is not None) == written
    if kept is not None:
        found: dict = {}
        exec(kept, found)
        with pytest.raises(AssertionError, match="assert 1 == 2"):
            found["test_one"]()
        monkeypatch.setattr(rewrite, "_rewrite_test", None)  # not a second time
        rewritten.keep([file], pytestconfig)
