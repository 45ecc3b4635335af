"""The preprocessing tool as a user calls it: names of its outputs, exit codes and messages."""

import json

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.lm.tools import preprocess_data


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3", "title": "4"}\n{"text": "5", "title": "6 7"}\n')
    (tmp_path / "b.txt").write_text("8 9\n<|endoftext|>\n10\n")
    common = ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--workers", "0"]
    return ["--input", str(tmp_path / "a.jsonl"), *common]


def read(prefix):
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_jsonl_and_txt_in_the_order_given(arguments, tmp_path, capsys):
    arguments.insert(2, str(tmp_path / "b.txt"))
    assert preprocess_data.main([*arguments, "--append-eod", "--log-interval", "2"]) == 0
    assert read(tmp_path / "out_text_document") == [[1, 2, 3, 49], [5, 49], [8, 9, 49], [10, 49]]
    assert json.loads((tmp_path / "out_text_document.json").read_text())["tokens"] == 11
    captured = capsys.readouterr()
    assert "out_text_document: 4 documents, 11 tokens (uint16)" in captured.out


def test_keys_and_no_eod(arguments, tmp_path):
    assert preprocess_data.main([*arguments, "--json-keys", "text", "title"]) == 0
    assert read(tmp_path / "out_text_document") == [[1, 2, 3], [5]]
    assert read(tmp_path / "out_title_document") == [[4], [6, 7]]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("{\n", "line 1: not JSON"), ('{"body": "1"}\n', "no key 'text'"), ('{"text": "fifty"}\n', "integers")],
)
def test_bad_input_exits_2_and_writes_nothing(arguments, tmp_path, capsys, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    assert preprocess_data.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--tokenizer-type", "WordPiece"], "choose one of GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer"),
        (["--tokenizer-model", "m"], "--tokenizer-model m belongs to HuggingFaceTokenizer"),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "m"], "--vocab-size 50 belongs to NullTokenizer"),
        (["--json-keys", "../x"], "--json-keys '../x' would be part of a file name"),
    ],
)
def test_bad_flags_exit_2(arguments, tmp_path, capsys, change, message):
    assert preprocess_data.main([*arguments, *change]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.promise("Data", "A refusal or a full disk leaves the previous dataset, without partial files or new folders.")
def test_a_refusal_leaves_no_folder(arguments, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "word"}\n')
    assert preprocess_data.main([*arguments, "--output-prefix", str(tmp_path / "o" / "deep" / "p")]) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "change",
    [["--workers", "-1"], ["--workers", "1000000"], ["--log-interval", "0"], ["--output-prefix", ""], ["--vocab-size", "2147483649"]],
)
def test_flags_out_of_range_exit_2(arguments, tmp_path, capsys, change):
    with pytest.raises(SystemExit) as leaving:
        preprocess_data.main([*arguments, *change])
    assert leaving.value.code == 2
    assert f"argument {change[0]}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_help_explains_the_forms(capsys):
    with pytest.raises(SystemExit) as left:
        preprocess_data.main(["--help"])
    assert left.value.code == 0
    assert "<|endoftext|>" in capsys.readouterr().out
