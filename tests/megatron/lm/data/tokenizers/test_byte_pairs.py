"""TikTokenizer against megatron-core's, Llama 3's file, and every bad input. GPT-2's is in test_tokenizer.py."""

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.texts import SPEECH
from helpers.tokenizer_files import TEXT, byte_pairs, llama3, token_list
from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import Tokenizer, build_tokenizer

SIZE = 256 + 60 + 20


def tik(path: Path, vocab_size: int | None = SIZE, **settings: Any) -> Tokenizer:
    values = {"tiktoken_num_special_tokens": 20} | settings
    return build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **values), vocab_size)


@pytest.mark.parametrize("pattern", ["v1", "v2", None])
@pytest.mark.parametrize("special", [(), ("</s>", "<s>", "<unk>", "<mask>", "<pad>", "<cls>", "<sep>", "<call>")])
def test_tiktokenizer_agrees_with_megatron_core(tmp_path: Path, pattern: str | None, special: tuple[str, ...]):
    from megatron.core.tokenizers import MegatronTokenizer

    path = token_list(tmp_path)
    settings = {"num_special_tokens": 20, "vocab_size": SIZE, "special_tokens": list(special) or None, "pattern": pattern or "v2"}
    theirs = MegatronTokenizer.from_pretrained(tokenizer_path=str(path), metadata_path={"library": "tiktoken"}, **settings)
    ours = tik(path, tiktoken_pattern=pattern, tokenizer_special_tokens=special)
    assert (ours.vocab_size, ours.eod, ours.mask) == (theirs.vocab_size, theirs.eod, theirs.mask)
    for text in (TEXT, SPEECH):
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours.detokenize(ours.tokenize(text)) == text


def test_a_shorter_vocabulary_leaves_out_the_last_merges(tmp_path: Path):
    ours = tik(token_list(tmp_path), SIZE - 30)
    assert max(ours.tokenize(SPEECH)) < SIZE - 30
    assert ours.detokenize(ours.tokenize(SPEECH)) == SPEECH


def test_a_special_token_s_spelling_is_text(tmp_path: Path):
    ours = tik(token_list(tmp_path))
    assert ours.eod not in ours.tokenize("a </s> b")
    assert ours.detokenize(ours.tokenize("a </s> b")) == "a </s> b"
    assert ours.detokenize([ours.eod, 19]) == "</s><SPECIAL_19>"


def test_llama_3_s_file_has_256_special_tokens_behind(tmp_path: Path):
    ours = build_tokenizer(DataConfig(tokenizer_type="Llama3Tokenizer", tokenizer_model=str(llama3(tmp_path))))
    assert (ours.vocab_size, ours.eod) == (316 + 256, 317)
    spelled = [ours.detokenize([i]) for i in (316, 317, 318, 322, 323, 325, 326, 571)]
    reserved = [f"<|reserved_special_token_{i}|>" for i in (0, 5, 250)]
    named = ["<|begin_of_text|>", "<|end_of_text|>", reserved[0], "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *reserved[1:]]
    assert spelled == named
    assert ours.detokenize(ours.tokenize(TEXT)) == TEXT
    numbers = [ours.detokenize([i]) for i in ours.tokenize("1234567")]
    assert "".join(numbers) == "1234567"


def test_llama_3_s_folder_of_hugging_face_is_read_too(tmp_path: Path):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|end_of_text|>": 1, "<|eot_id|>": 2}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert build_tokenizer(DataConfig(tokenizer_type="Llama3Tokenizer", tokenizer_model=str(path))).eod == 1


def test_words_begin_with_a_space_and_special_tokens_are_words(tmp_path: Path):
    ours = tik(token_list(tmp_path))
    begins = ours.word_begins()
    assert begins[:20].all()
    ids = ours.tokenize("of the")
    assert [bool(begins[i]) for i in ids] == [ours.detokenize([i]).startswith(" ") for i in ids]


def test_it_is_pickled_to_readers_that_are_spawned(tmp_path: Path):
    ours = tik(token_list(tmp_path))
    assert pickle.loads(pickle.dumps(ours)).tokenize(TEXT) == ours.tokenize(TEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": None}, "lists 316 tokens, and --vocab-size 131072 with 20 special tokens needs 131052: use --vocab-size 336"),
        ({"tiktoken_num_special_tokens": 6}, "--tiktoken-num-special-tokens 6 must be between the 7 that are listed and --vocab-size"),
        ({"tiktoken_num_special_tokens": 81}, "--tiktoken-num-special-tokens 81 must be between the 7 .* and --vocab-size 336 minus 256"),
        (
            {"tokenizer_special_tokens": ("<unk>", "<s>")},
            "--tokenizer-special-tokens <unk> <s>: list each once, with <unk>, <s>, </s> among",
        ),
        ({"tokenizer_special_tokens": ("<unk>", "<s>", "</s>", "<s>")}, "list each once"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tik(token_list(tmp_path), **settings)


def entries(tokens: list[bytes]) -> list[dict[str, Any]]:
    return [{"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": ""} for i, token in enumerate(tokens)]


BAD = {
    "no JSON": "{",
    "no list": "{}",
    "another list": "[1, 2]",
    "no bytes": json.dumps([{"rank": 0, "token_bytes": "!"}]),
    "ranks": json.dumps(entries(byte_pairs(4))[1:]),
    "twice": json.dumps(entries([*byte_pairs(4), b"a"])),
    "order": json.dumps(entries(byte_pairs(4)[::-1])),
}


@pytest.mark.parametrize("name", BAD)
def test_another_file_is_refused(tmp_path: Path, name: str):
    (tmp_path / "tokens.json").write_text(BAD[name])
    with pytest.raises(
        ValueError, match=r'tokens\.json is not a list of {"rank", "token_bytes", "token_str"}, as TikTokenizer reads it: .'
    ):
        tik(tmp_path / "tokens.json")


@pytest.mark.parametrize("content", ["not a file of Llama", "YQ== 0\nYg== 2\n", "YQ== 0\n", "!! 0\n"])
def test_another_file_than_llama_3_s_is_refused(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.model").write_text(content)
    with pytest.raises(ValueError, match=r"is not Llama 3's tokenizer\.model, a token in base 64 and its id per line: ."):
        build_tokenizer(DataConfig(tokenizer_type="Llama3Tokenizer", tokenizer_model=str(tmp_path / "tokenizer.model")))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"--tokenizer-type TikTokenizer needs the package tiktoken \(.*\): pip install tiktoken"):
        tik(token_list(tmp_path))
