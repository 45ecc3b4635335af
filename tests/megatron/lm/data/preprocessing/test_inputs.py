"""Documents of JSON lines and text."""

import json
import os
from pathlib import Path

import pytest

from megatron.lm.data.preprocessing.inputs import check_input, read_documents
from megatron.lm.tools import preprocess_data


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


@pytest.mark.timeout(60)
@pytest.mark.promise("Data", "A pipe as an input is refused; nothing waits for it.")
def test_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo(path := tmp_path / "a.jsonl")
    command = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "NullTokenizer"]
    assert preprocess_data.main([*command, "--vocab-size", "50", "--workers", "0"]) == 2
    assert f"{path} " in capsys.readouterr().err


def test_what_is_not_an_input_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.parquet").write_text("abc")
    (tmp_path / "folder").mkdir()
    assert check_input(tmp_path / "a.txt") == tmp_path / "a.txt"
    for name in ("none.txt", "empty.jsonl", "a.parquet", "folder"):
        with pytest.raises(ValueError, match=name):
            check_input(tmp_path / name)


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
