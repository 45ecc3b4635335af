"""Documents of JSON lines, text, parquet and folders of datasets."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers import hosts
from megatron.lm.data.preprocessing.inputs import files_of, read_documents
from megatron.lm.tools import preprocess_data

ROWS = [{"text": "h\u00e9llo", "id": 1}, {"text": "world", "id": 2}]


def texts(path: Path, *more: str) -> list[str]:
    return [document.texts["text"] for document in read_documents(path, ["text"], *more)]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_json_lines(tmp_path: Path, mark: str):
    path = tmp_path / "a.jsonl"
    path.write_text(mark + '{"text": "one", "id": 1}\n\n{"text": "zw\u00f6lf"}\n', encoding="utf-8")
    assert texts(path) == ["one", "zw\u00f6lf"]
    assert sum(document.source_bytes for document in read_documents(path, ["text"])) == path.stat().st_size - 1


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(
    ("separator", "expected"),
    [("endoftext", ["a\n\nb", "c"]), ("blank-lines", ["a", "b\n<|endoftext|>\nc"])],
)
def test_plain_text(tmp_path: Path, separator: str, expected: list[str], mark: str):
    (tmp_path / "a.txt").write_text(mark + "a\n\nb\n<|endoftext|>\nc\n", encoding="utf-8")
    assert texts(tmp_path / "a.txt", separator) == expected
    with pytest.raises(ValueError, match="pages"):
        texts(tmp_path / "a.txt", "pages")


def test_parquet_a_file_and_a_folder(tmp_path: Path):
    arrow, parquet = hosts.need("pyarrow", "data"), hosts.need("pyarrow.parquet", "data")
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, part in (("b", ROWS[1:]), ("a", ROWS[:1])):
        parquet.write_table(arrow.Table.from_pylist(part), tmp_path / "set" / "data" / f"{name}.parquet")
    assert texts(tmp_path / "set") == [row["text"] for row in ROWS]
    assert texts(tmp_path / "set" / "data" / "a.parquet") == [ROWS[0]["text"]]
    with pytest.raises(ValueError, match="'body'"):
        list(read_documents(tmp_path / "set", ["body"]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ValueError, match=r"bad\.parquet"):
        texts(tmp_path / "bad.parquet")


def test_a_saved_dataset(tmp_path: Path):
    datasets = hosts.need("datasets", "eval")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved") == [row["text"] for row in ROWS]


@pytest.mark.timeout(60)
@pytest.mark.promise("Data", "A pipe among the files of an input is refused; nothing waits for it.")
@pytest.mark.parametrize("name", ["set/a.parquet", "set/state.json", "set", "a.jsonl"])
def test_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    (tmp_path / "set").is_dir() and (tmp_path / "set" / "b.parquet").write_bytes(b"PAR1")
    command = ["--input", str(tmp_path / name.split("/")[0]), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "NullTokenizer"]
    assert preprocess_data.main([*command, "--vocab-size", "50", "--workers", "0"]) == 2
    assert f"{path} " in capsys.readouterr().err


def test_what_is_not_an_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").write_text("abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"x")
    assert files_of(tmp_path / "a.txt") == [tmp_path / "a.txt"]
    for name in ("none.txt", "empty.jsonl", "a.csv", "folder"):
        with pytest.raises(ValueError, match=name):
            files_of(tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="pyarrow"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2"),
        ("[" * 100_000, "line 1"),
        ('{"text": "a", "id": ' + "7" * 5000 + "}", "line 1"),
        ('["a"]\n', "line 1"),
        ('{"body": "a"}\n', "'body'"),
        ('{"text": 3}\n', "int"),
        (json.dumps({"text": "\ud800"}), "surrogate"),
    ],
)
def test_a_line_that_has_no_text_is_named(tmp_path: Path, content: str, culprit: str):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=culprit):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_is_not_utf_8_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match="UTF-8"):
        texts(tmp_path / name)
