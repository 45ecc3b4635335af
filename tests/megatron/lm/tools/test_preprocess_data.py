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
