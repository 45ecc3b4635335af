"""Tokenizers from folders. Attacks are in tests/attack/test_hugging_face_folders.py."""

import json

import pytest

from helpers import post_runs
from megatron.lm.hugging_face.models import load_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture
def toy(tmp_path):
    return post_runs.toy(tmp_path)


def test_ids_are_those_of_from_pretrained(toy):
    ours, theirs = load_tokenizer(toy, padding_side="left"), transformers.AutoTokenizer.from_pretrained(toy)
    text = "It's naïve 🙂<|end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.padding_side, ours.chat_template) == ("left", theirs.chat_template)


@pytest.mark.parametrize("name", ["vocab", "merges_file", "tokenizer_file", "init_inputs"])
def test_files_that_the_configuration_names_are_refused(toy, name):
    path = toy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: ["../x"]}))
    with pytest.raises(ValueError, match=rf"tokenizer_config.json names files \({name}: .*remove the entry"):
        load_tokenizer(toy)


def test_what_is_not_a_tokenizer_is_told_in_one_line(toy):
    (toy / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    with pytest.raises(ValueError, match=r"has no tokenizer that transformers can load \(.*\)$"):
        load_tokenizer(toy)
