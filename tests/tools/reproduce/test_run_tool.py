"""A tool in a process of its own."""

import pytest

from tools.reproduce.run_tool import byte_flags, numbers, rows_of


@pytest.mark.usefixtures("uncompiled")
def test_the_rows_of_a_tool_are_read_and_its_failure_told(tmp_path):
    file = tmp_path / "new" / "lstm.csv"
    (tmp_path / "text").write_text("some words, and more of them " * 50)
    found = rows_of("fp16_lstm", ["--text", str(tmp_path / "text"), "--size", "tiny", "--csv", str(file)], file)
    assert [row["level"] for row in found] == ["O0", "O2", "O2", "O2", "O2"]
    with pytest.raises(RuntimeError, match="--size"):
        rows_of("fp16_lstm", ["--text", str(tmp_path / "text"), "--size", "none"], file)


def test_columns_that_are_empty_give_no_number():
    assert list(numbers({"a": "1.5", "b": ""}, {"a": "first", "b": "second", "c": "third"})) == [("first", 1.5)]


def test_the_trainers_flags_name_files_that_are_there(tmp_path):
    (tmp_path / "text").write_text("some words, and more of them " * 50)
    flags = byte_flags(tmp_path / "text", tmp_path)
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (tmp_path / "bytes" / "train_text_document.bin").is_file()
    assert named["--vocab-file"] == str(tmp_path / "bytes" / "encoder.json")
