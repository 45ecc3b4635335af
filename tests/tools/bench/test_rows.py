import csv
import subprocess

import pytest

from tools.bench import rows


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "a.csv"
    rows.append(path, [{"case": "O0", "ms": 1}])
    rows.append(path, [{"case": "O2", "ms": 2}, {"case": "O3", "ms": 3}])
    with path.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert found == [{"case": "O0", "ms": "1"}, {"case": "O2", "ms": "2"}, {"case": "O3", "ms": "3"}]


def test_other_columns_are_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.csv"
    rows.append(path, [{"case": "O0", "ms": 1}])
    before = path.read_text()
    with pytest.raises(ValueError, match="write to another file"):
        rows.append(path, [{"case": "O0", "seconds": 1}])
    assert path.read_text() == before


@pytest.mark.parametrize(("file", "mark"), [("tools/bench/results/step.csv", ""), ("docs/results/results.md", ""), ("msamp/optim.py", "+")])
def test_code_with_uncommitted_changes_is_marked_and_results_are_not(tmp_path, monkeypatch, file, mark):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, "-C", str(tmp_path), *words], capture_output=True, text=True, check=True).stdout

    (path := tmp_path / file).parent.mkdir(parents=True)
    path.write_text("before")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    head = git("rev-parse", "--short", "HEAD").strip()
    assert rows.commit() == head
    path.write_text("after")
    assert rows.commit() == head + mark


def test_aligned_rows_are_as_wide_as_their_longest_cell():
    assert rows.aligned(("a", "ms"), [{"a": "O2", "ms": 1234, "more": 0}, {"a": "", "ms": 5}]) == " a    ms\nO2  1234\n       5"
