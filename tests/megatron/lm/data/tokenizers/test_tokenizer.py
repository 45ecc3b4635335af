"""Tokenizers: against their libraries and megatron-core, special tokens in the text, what a library drops, and damaged files."""

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from helpers.texts import SPEECH
from helpers.tokenizer_files import TEXT, byte_pairs, llama3, sentence_pieces, token_list
from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT, HuggingFaceTokenizer, NullTokenizer, Tokenizer, build_tokenizer

SIZE = 256 + 60 + 20


def of(kind: str, path: Path, vocab_size: int | None = None, **settings: Any) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(path), **settings), vocab_size)


def tik(path: Path, vocab_size: int | None = SIZE, **settings: Any) -> Tokenizer:
    return of("TikTokenizer", path, vocab_size, **{"tiktoken_num_special_tokens": 20} | settings)


def gpt2(folder: Path) -> Tokenizer:
    files = {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}
    return build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", **files))


def trained(end: str = END_OF_TEXT) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tokenizer.json of a BPE trained here, and the same in the form of GPT-2's two files."""
    trained().save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "encoder.json").write_text(json.dumps(content["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_pieces(tmp_path_factory.mktemp("model"))


def test_gpt2_and_tokenizer_json_agree_with_the_library(folder: Path):
    reference = trained()
    for ours in (gpt2(folder), of("HuggingFaceTokenizer", folder), of("HuggingFaceTokenizer", folder / "tokenizer.json")):
        assert ours.tokenize(TEXT) == reference.encode(TEXT).ids
        assert ours.detokenize([*ours.tokenize(TEXT), ours.eod]) == TEXT + END_OF_TEXT
        assert (ours.vocab_size, ours.eod) == (reference.get_vocab_size(), 0)
        assert json.loads(json.dumps(ours.unique_identifiers))["vocab_size"] == ours.vocab_size


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
    assert max(tik(path, SIZE - 30).tokenize(SPEECH)) < SIZE - 30, "a shorter vocabulary leaves out the last merges"


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_agrees_with_megatron_core(pieces: Path, kind: str):
    from megatron.core.tokenizers import MegatronTokenizer

    theirs = MegatronTokenizer.from_pretrained(tokenizer_path=str(pieces), metadata_path={"library": "sentencepiece"}, legacy=False)
    ours = of(kind, pieces)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (360, 2)
    assert ours.tokenize(TEXT) == theirs.tokenize(TEXT)
    assert ours.detokenize(ours.tokenize(TEXT)) == TEXT


def test_legacy_sentencepiece_adds_special_tokens_and_llama_2_begins_with_bos(pieces: Path, tmp_path: Path):
    """<CLS> <SEP> <EOD> <MASK>, then a pad, bos or eos that the model lacks, each behind the last id (Megatron-LM's tokenizer.py)."""
    ours = of("SentencePieceTokenizer", pieces, legacy_tokenizer=True)
    assert (ours.vocab_size, ours.eod, ours.mask) == (365, 362, 363)
    ids = ours.tokenize(TEXT)
    assert ids == of("Llama2Tokenizer", pieces).tokenize(TEXT)
    assert ours.detokenize([*ids, 362, *ids, 364]) == f"{TEXT}<EOD>{TEXT}<PAD>"
    whole = of("SentencePieceTokenizer", sentence_pieces(tmp_path, pad_id=3, user_defined_symbols=["<EOD>"]), legacy_tokenizer=True)
    assert whole.vocab_size == 363
    assert whole.detokenize([whole.eod]) == "<EOD>"
    assert of("Llama2Tokenizer", pieces, legacy_tokenizer=True).tokenize(TEXT) == [1, *ids]


def test_llama_3_s_file_has_256_special_tokens_behind(tmp_path: Path):
    ours = of("Llama3Tokenizer", llama3(tmp_path))
    assert (ours.vocab_size, ours.eod) == (316 + 256, 317)
    spelled = [ours.detokenize([i]) for i in (316, 317, 318, 322, 323, 325, 326, 571)]
    reserved = [f"<|reserved_special_token_{i}|>" for i in (0, 5, 250)]
    named = ["<|begin_of_text|>", "<|end_of_text|>", reserved[0], "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *reserved[1:]]
    assert spelled == named
    assert ours.detokenize(ours.tokenize(TEXT)) == TEXT
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|end_of_text|>": 1, "<|eot_id|>": 2}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert of("Llama3Tokenizer", path).eod == 1


def test_null_tokenizer():
    ours = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100)
    assert (ours.vocab_size, ours.eod) == (100, 99)
    assert ours.tokenize(" 1 22\n3") == [1, 22, 3]
    assert ours.detokenize([1, 22, 3]) == "1 22 3"
    # megatron-core masks the loss where a label equals tokenizer.pad: without one it takes -1, which no label is.
    assert not hasattr(ours, "pad")
    for word in ("x", "1.5", "100", "-1"):
        with pytest.raises(ValueError, match=word.replace("-", "[-]")):
            ours.tokenize(f"1 {word}")
    with pytest.raises(ValueError, match="128"):
        ours.detokenize([1, 128])


def each(folder: Path, pieces: Path) -> list[Tokenizer]:
    return [gpt2(folder), of("HuggingFaceTokenizer", folder), tik(token_list(folder)), of("SentencePieceTokenizer", pieces)]


def test_spelling_of_a_special_token_in_text_is_text_and_readers_get_it_pickled(folder: Path, pieces: Path):
    for ours in [*each(folder, pieces), of("SentencePieceTokenizer", pieces, legacy_tokenizer=True)]:
        for token in (END_OF_TEXT, "</s>", "<EOD>"):
            ids = ours.tokenize(f"a {token} b")
            assert ours.eod not in ids
            assert ours.detokenize(ids) == f"a {token} b"
        assert pickle.loads(pickle.dumps(ours)).tokenize(TEXT) == ours.tokenize(TEXT)


def test_byte_pairs_of_two_kinds_share_no_index_cache_and_the_default_pattern_parts_words_at_capitals(folder: Path):
    classes = [ours.unique_identifiers["class"] for ours in (gpt2(folder), tik(token_list(folder)))]
    assert classes == ["GPT2BPETokenizer", "TikTokenizer"]
    tokens = [*(bytes([byte]) for byte in range(256)), b"aB"]
    content = [{"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for i, token in enumerate(tokens)]
    (folder / "capitals.json").write_text(json.dumps(content))
    sizes = [len(tik(folder / "capitals.json", 277, tiktoken_pattern=pattern).tokenize("aB")) for pattern in (None, "v1", "v2")]
    assert sizes == [2, 1, 2]


def test_words_begin_with_a_space_or_where_the_vocabulary_says_so(folder: Path, pieces: Path):
    for ours in each(folder, pieces):
        begins, ids = ours.word_begins(), ours.tokenize("of the state of the union")
        assert [bool(begins[i]) for i in ids[1:]] == [
            ours.detokenize([ids[0], i]).startswith(ours.detokenize([ids[0]]) + " ") for i in ids[1:]
        ]
        assert begins[ours.eod] or isinstance(ours, HuggingFaceTokenizer)
    ours = of("SentencePieceTokenizer", pieces)  # which spells other blanks in bytes: a word begins with them, as in byte-level BPE
    for text, begin in (("a\nb", True), ("a\tb", True), ("a🙂b", False)):
        assert set(ours.word_begins()[ours.tokenize(text)[1:]]) == {begin, False}, text

    def huggingface(vocabulary: list[str]) -> HuggingFaceTokenizer:
        model = models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
        tokenizers.Tokenizer(model).save(str(folder / "words.json"))
        return HuggingFaceTokenizer(folder / "words.json")

    wordpiece = huggingface(["[UNK]", "[MASK]", "</s>", "play", "##ing"])
    assert wordpiece.word_begins().tolist() == [True, True, True, True, False]
    assert wordpiece.mask == 1
    assert huggingface(["[UNK]", "</s>", "\u0120play", "ing", "\u2581on", "\u010a"]).word_begins().tolist() == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]


def huggingface(folder: Path, model: Any, **parts: Any) -> Tokenizer:
    """Of a model with few letters and no way to spell the others, at `folder`."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return of("HuggingFaceTokenizer", folder)


LETTERS, MERGES = {"a": 0, "b": 1, "ab": 2}, [("a", "b")]
NARROW = [
    models.BPE(vocab=LETTERS, merges=MERGES),
    models.BPE(vocab=LETTERS, merges=MERGES, byte_fallback=True),
    models.BPE(vocab=LETTERS, merges=MERGES, unk_token="<unk>"),
    models.WordLevel(vocab={"ab": 0}, unk_token="<unk>"),
    models.Unigram([("a", -1.0), ("b", -2.0)]),
]


@pytest.mark.promise("Data", "Preprocessing refuses text that the tokenizer cannot encode.")
@pytest.mark.parametrize("model", NARROW, ids=[f"{type(model).__name__}-{i}" for i, model in enumerate(NARROW)])
def test_text_that_a_tokenizer_cannot_spell_is_refused(tmp_path: Path, model: Any):
    ours = huggingface(tmp_path, model)
    assert ours.tokenize("ab")
    for _ in range(2):
        with pytest.raises(ValueError, match="tokenizer"):
            ours.tokenize("abz")


def test_text_is_neither_cut_nor_padded_and_what_a_tokenizer_removes_on_purpose_is_not_missed(tmp_path: Path, pieces: Path):
    model = models.BPE(vocab=LETTERS, merges=MERGES)
    ours = huggingface(tmp_path, model, normalizer=normalizers.Lowercase(), pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    assert ours.tokenize("AB  ab\n") == [2, 2]
    tokenizer = trained()
    expected = tokenizer.encode("the quick brown fox").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10**12)
    tokenizer.save(str(tmp_path / "cut.json"))
    assert of("HuggingFaceTokenizer", tmp_path / "cut.json").tokenize("the quick brown fox") == expected
    with pytest.raises(ValueError, match="tokenizer"):
        of("Llama2Tokenizer", pieces).tokenize("a\ud800b")


@pytest.mark.parametrize("largest", [2**31, 2**32 - 1])
def test_ids_from_two_to_the_31_are_refused(folder: Path, largest: int):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["far away"] = largest
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=str(largest)):
        of("HuggingFaceTokenizer", folder)


@pytest.mark.promise("Data", "Settings of another tokenizer are refused.")
@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"vocab_file": "v"}, "--vocab-file"),
        ({"tiktoken_pattern": "v2"}, "--tiktoken-pattern"),
        ({"tiktoken_num_special_tokens": 5}, "--tiktoken-num-special-tokens"),
        ({"tokenizer_special_tokens": ("<s>", "</s>")}, "--tokenizer-special-tokens"),
        ({"legacy_tokenizer": True}, "--legacy-tokenizer"),
        ({"vocab_size": 50}, "--vocab-size"),
    ],
)
def test_settings_of_another_tokenizer_are_refused(folder: Path, settings: dict[str, Any], flag: str):
    with pytest.raises(ValueError, match=flag):
        of("HuggingFaceTokenizer", folder, **settings)


def test_a_folder_s_eos_token_ends_a_document_as_in_megatron_lm(folder: Path):
    """Of an instruct model, whose vocabulary has the base model's end of text too."""
    reference = trained()
    reference.add_special_tokens(["<|im_end|>"])
    reference.save(str(folder / "tokenizer.json"))
    assert of("HuggingFaceTokenizer", folder).eod == 0
    for eos in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert of("HuggingFaceTokenizer", folder).eod == reference.token_to_id("<|im_end|>")
    assert of("HuggingFaceTokenizer", folder / "tokenizer.json").eod == 0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"vocab_size": None}, "336"),
        ({"tiktoken_num_special_tokens": 6}, "--tiktoken-num-special-tokens"),
        ({"tiktoken_num_special_tokens": 81}, "--tiktoken-num-special-tokens"),
        ({"tokenizer_special_tokens": ("<unk>", "<s>")}, "--tokenizer-special-tokens"),
        ({"tokenizer_special_tokens": ("<unk>", "<s>", "</s>", "<s>")}, "--tokenizer-special-tokens"),
    ],
)
def test_counts_of_tiktokenizer_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], flag: str):
    with pytest.raises(ValueError, match=flag):
        tik(token_list(tmp_path), **settings)


def entries(tokens: list[bytes]) -> bytes:
    encoded = [base64.b64encode(token).decode() for token in tokens]
    return json.dumps([{"rank": i, "token_bytes": token, "token_str": ""} for i, token in enumerate(encoded)]).encode()


NESTED = b"[" * 100_000 + b"]" * 100_000
DAMAGED = [
    ("GPT2BPETokenizer", "encoder.json", content)
    for content in (
        b"{",
        b'["a"]',
        b'{"a": 0}',
        b"\xff",
        NESTED,
        '{"<|endoftext|>": 0, "\u4e00": 1}'.encode(),
        b'{"<|endoftext|>": 0, "t": 1}',
    )
]
DAMAGED += [("GPT2BPETokenizer", "vocab.bpe", content) for content in (b"", b"t h e\n", b"q q\n", b"\xff\xfe", b"t h\nt h\n")]
DAMAGED += [("HuggingFaceTokenizer", "tokenizer.json", content) for content in (b'{"model": ', b"\xff", NESTED, b"[]")]
DAMAGED += [("HuggingFaceTokenizer", "tokenizer_config.json", content) for content in (b'{"eos_token": 3}', b"[]", b"{", b"\xff", NESTED)]
DAMAGED += [("Llama2Tokenizer", "tokenizer.model", content) for content in (b"", b"{}")]
DAMAGED += [("Llama3Tokenizer", "tokenizer.model", content) for content in (b"no file", b"YQ== 0\nYg== 2\n", b"YQ== 0\n", b"!! 0\n")]
DAMAGED += [
    ("TikTokenizer", "tokens.json", content)
    for content in (
        b"{",
        b"{}",
        b"[1, 2]",
        NESTED,
        b'[{"rank": 0, "token_bytes": "!"}]',
        entries([*byte_pairs(4), b"a"]),
        entries(byte_pairs(4)[::-1]),
    )
]


@pytest.mark.promise("Data", "A damaged file of a tokenizer is refused in one line.")
@pytest.mark.parametrize(("kind", "name", "content"), DAMAGED, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(DAMAGED)])
def test_a_damaged_file_is_refused_in_one_line(folder: Path, kind: str, name: str, content: bytes):
    (folder / name).write_bytes(content)
    culprit = "Llama3" if content == b"YQ== 0\n" else "--merge-file" if content.endswith(b'"t": 1}') else name
    with pytest.raises(ValueError, match=culprit) as caught:
        gpt2(folder) if kind == "GPT2BPETokenizer" else of(kind, folder if kind.startswith("Hugging") else folder / name)
    assert len(str(caught.value)) < 1000


def test_what_is_missing_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for kind, settings, name in (
        ("BertTokenizer", {}, "choose one of GPT2BPETokenizer"),
        ("GPT2BPETokenizer", {}, "--vocab-file is missing"),
        ("GPT2BPETokenizer", {"vocab_file": "nowhere.json"}, "--vocab-file nowhere.json"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "nowhere"}, "--tokenizer-model nowhere"),
        ("NullTokenizer", {}, "--vocab-size"),
    ):
        with pytest.raises(ValueError, match=name):
            build_tokenizer(DataConfig(tokenizer_type=kind, **settings))
    trained(end="[SEP]").save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="</s>"):
        of("HuggingFaceTokenizer", folder)
    bare = sentence_pieces(tmp_path, eos_id=-1, bos_id=-1)
    with pytest.raises(ValueError, match="eos"):
        of("GPTSentencePieceTokenizer", bare)
    with pytest.raises(ValueError, match="bos"):
        of("Llama2Tokenizer", bare, legacy_tokenizer=True)
    assert of("SentencePieceTokenizer", bare, legacy_tokenizer=True).vocab_size == 367
    for package, kind in (("tiktoken", "Llama3Tokenizer"), ("sentencepiece", "Llama2Tokenizer")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"pip install {package}"):
            of(kind, llama3(tmp_path))
    assert isinstance(build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 3), NullTokenizer)
