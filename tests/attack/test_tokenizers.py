"""Hostile tokenizer.json files: a text that a few kilobytes would multiply without end is refused, and nothing is left behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import post_runs
from megatron.lm.data.tokenizers.tokenizer import HuggingFaceTokenizer
from megatron.lm.evaluation.models import opened
from megatron.lm.post import models
from megatron.lm.tools import preprocess_data
from megatron.lm.tools.prepare_text import train_bpe

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACED = {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "aa"}
MULTIPLIERS: dict[str, dict[str, Any]] = {
    "replacements": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 2300}},  # 150 KB
    "expressions": {"normalizer": {"type": "Sequence", "normalizers": [SPACED] * 50}},
    "a long replacement": {"normalizer": DOUBLE | {"content": "a" * 150_000}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 150_000}},
    "sequences": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 10}] * 10}},
    "bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "use_regex": False}] * 60}},
    "padding": {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
}
# An expression that takes years to compile, and one that takes 8 seconds and 400 MB for 260 KB.
CALLS = "(?<a0>x?){0}" + "".join(rf"(?<a{i}>\g<a{i - 1}>\g<a{i - 1}>){{0}}" for i in range(1, 40)) + r"\g<a39>"
EXPRESSIONS = {"calls": CALLS, "classes": r"[\p{L}&&[^a]]" * 20_000}
DEFAULTS = {"add_prefix_space": False, "trim_offsets": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_bpe(tmp_path, ["a banana and an apple"] * 20, 300)
    (tmp_path / "text.txt").write_text("a banana\n" * 100)
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("name", MULTIPLIERS)
def test_preprocessing_refuses_it_and_leaves_nothing(folder: Path, name: str, workers: str, capsys: pytest.CaptureFixture[str]):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text()) | MULTIPLIERS[name]
    for step in (content["pre_tokenizer"] or {}).get("pretokenizers", []):
        step.update({key: value for key, value in DEFAULTS.items() if step["type"] == "ByteLevel" and key not in step})
    path.write_text(json.dumps(content))
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path} --input {folder / 'text.txt'} --workers {workers}"
    code = preprocess_data.main([*flags.split(), "--output-prefix", str(folder / "out" / "data")])
    if name == "padding":  # does not belong to a dataset
        assert code == 0
        return
    assert code == 2
    assert "can make a text" in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_that_never_compiles_is_refused(folder: Path, name: str, part: str, capsys: pytest.CaptureFixture[str]):
    path, kind = folder / "tokenizer.json", {"normalizer": "Replace", "pre_tokenizer": "Split"}[part]
    more = {"content": "b"} if kind == "Replace" else {"behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: {"type": kind, "pattern": {"Regex": EXPRESSIONS[name]}} | more}))
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path} --input {folder / 'text.txt'} --workers 0"
    assert preprocess_data.main([*flags.split(), "--output-prefix", str(folder / "out" / "data")]) == 2
    assert "tokenizer.json of the tokenizers library: its regular expression" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_text_that_a_tokenizer_multiplies_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Below the bound of the file, which few characters reach."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": DOUBLE | {"content": "a" * 4000}}))
    assert HuggingFaceTokenizer(path).tokenize("b n")
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path} --input {folder / 'text.txt'} --workers 0"
    assert preprocess_data.main([*flags.split(), "--output-prefix", str(folder / "out" / "data")]) == 2
    assert "cannot encode the text: its normalizer makes" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_sentencepiece_model_that_multiplies(folder: Path, capsys: pytest.CaptureFixture[str]):
    """By the rules that it was trained with: each "a" becomes 4,000."""
    pytest.importorskip("sentencepiece")
    from helpers import tokenizer_files

    (folder / "rules.tsv").write_text(f"61\t{'61 ' * 4000}\n")
    model = tokenizer_files.sentence_pieces(folder, normalization_rule_tsv=str(folder / "rules.tsv"), normalization_rule_name="")
    flags = f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {model} --input {folder / 'text.txt'} --workers 0"
    assert preprocess_data.main([*flags.split(), "--output-prefix", str(folder / "out" / "data")]) == 2
    assert "cannot encode the text: its normalizer makes" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_hugging_face_folder_with_one_is_refused(tmp_path: Path):
    pytest.importorskip("transformers")
    path = post_runs.toy(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MULTIPLIERS["replacements"]))
    with pytest.raises(ValueError, match=r"its normalizer can make a text .* times as long, and at most 4096 is accepted"):
        models.load_tokenizer(tmp_path)


def test_evaluation_refuses_a_text_that_a_folder_multiplies(tmp_path: Path):
    pytest.importorskip("transformers")
    path = post_runs.toy(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": DOUBLE | {"content": "a" * 4000}}))
    with opened(tmp_path) as model:
        assert model.encode("b n")
        with pytest.raises(ValueError, match=r"cannot encode the text .*its normalizer makes \d+ bytes of the 8 of 'a banana'"):
            model.encode("a banana")
