"""Rows of JSON lines, of parquet, and of folders of datasets."""

import json
import sys
from pathlib import Path

import pytest

from helpers import hosts
from megatron.lm.data.preprocessing import rows

ROWS = [{"text": "h\u00e9llo", "id": 1}, {"text": "world", "id": 2}]


def test_lines_and_their_bytes(tmp_path: Path):
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (tmp_path / "a.jsonl").write_text(lines[0] + "\n" + lines[1])
    assert list(rows.read(tmp_path / "a.jsonl")) == [(row, len(line)) for row, line in zip(ROWS, lines, strict=True)]
    assert rows.size(tmp_path / "a.jsonl") == len("".join(lines)) + 1


def test_parquet_a_file_and_a_folder(tmp_path: Path):
    arrow, parquet = hosts.need("pyarrow", "data"), hosts.need("pyarrow.parquet", "data")
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, part in (("b", ROWS[1:]), ("a", ROWS[:1])):
        parquet.write_table(arrow.Table.from_pylist(part), tmp_path / "set" / "data" / f"{name}.parquet")
    assert [row for row, _ in rows.read(tmp_path / "set")] == ROWS
    assert [row for row, _ in rows.read(tmp_path / "set" / "data" / "a.parquet", ["text"])] == [{"text": ROWS[0]["text"]}]
    with pytest.raises(ValueError, match=r"has no column 'body'; it has 'text', 'id'"):
        list(rows.read(tmp_path / "set", ["body"]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read as parquet"):
        list(rows.read(tmp_path / "bad.parquet"))


def test_a_saved_dataset(tmp_path: Path):
    datasets = hosts.need("datasets", "eval")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert [row for row, _ in rows.read(tmp_path / "saved")] == ROWS
    assert [row for row, _ in rows.read(tmp_path / "saved", ["id"])] == [{"id": 1}, {"id": 2}]
    assert rows.size(tmp_path / "saved") > 0


def test_a_library_that_lacks_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"a.parquet needs pyarrow.parquet .*pip install -e '\.\[data\]', or use .jsonl"):
        list(rows.read(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl does not exist: use .jsonl"),
        ("a.csv", "x", "a.csv: kind '.csv' is unknown"),
        ("a.jsonl", "", "a.jsonl is empty"),
    ],
)
def test_what_is_no_input_is_refused(tmp_path: Path, name: str, content: str | None, message: str):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        rows.size(tmp_path / name)


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has neither state.json .* nor .parquet files"):
        rows.size(tmp_path)


@pytest.mark.parametrize(("line", "message"), [("{", "line 2: not JSON"), ("3", "line 2: expected a JSON object, not a int")])
def test_lines_that_are_no_objects_are_refused(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(rows.read(tmp_path / "a.jsonl"))


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    assert [row for row, _ in rows.read(tmp_path / "a.jsonl")] == [{"text": "a"}, {"text": "b"}]
