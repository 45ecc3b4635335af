"""Tokenizers: round trips, special tokens in the text, the seam to megatron-core, and every bad input."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT, HuggingFaceTokenizer, NullTokenizer, build_tokenizer

TEXT = "It's the state of the union: 1,234 words - naïve façade.\n\n  the the 🙂 end"


def trained(end: str = END_OF_TEXT) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


@pytest.fixture
def gpt2_files(tmp_path):
    """Files in the form of GPT-2's, from a BPE trained here; the reference tokenizer too."""
    reference = trained()
    content = json.loads(reference.to_str())["model"]
    (tmp_path / "encoder.json").write_text(json.dumps(content["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return tmp_path, reference


def gpt2(folder):
    return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "encoder.json"), merge_file=str(folder / "vocab.bpe"))


def test_gpt2_bpe_agrees_with_the_tokenizers_library(gpt2_files):
    folder, reference = gpt2_files
    tokenizer = build_tokenizer(gpt2(folder))
    assert tokenizer.tokenize(TEXT) == reference.encode(TEXT).ids
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.get_vocab_size(), reference.token_to_id(END_OF_TEXT))


def test_gpt2_bpe_is_not_confused_by_a_second_file_of_the_same_name(gpt2_files):
    folder, _ = gpt2_files
    first = build_tokenizer(gpt2(folder)).vocab_size
    vocabulary = json.loads((folder / "encoder.json").read_text())
    (folder / "encoder.json").write_text(json.dumps(dict(list(vocabulary.items())[:-1])))
    merges = (folder / "vocab.bpe").read_text().splitlines()[:-1]
    (folder / "vocab.bpe").write_text("\n".join(merges))
    assert build_tokenizer(gpt2(folder)).vocab_size == first - 1


@pytest.mark.parametrize("as_folder", [False, True])
def test_huggingface_round_trip(tmp_path, as_folder):
    reference = trained()
    reference.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path if as_folder else tmp_path / "tokenizer.json"
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.get_vocab_size(), 0)


@pytest.mark.parametrize("kind", ["gpt2", "huggingface"])
def test_spelling_of_a_special_token_in_text_is_text(gpt2_files, kind):
    folder, reference = gpt2_files
    reference.save(str(folder / "tokenizer.json"))
    config = gpt2(folder) if kind == "gpt2" else DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokenizer = build_tokenizer(config)
    ids = tokenizer.tokenize(f"the {END_OF_TEXT} end")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == f"the {END_OF_TEXT} end"
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_TEXT


def test_null_tokenizer():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize(" 1 22\n3") == [1, 22, 3]
    assert tokenizer.detokenize([1, 22, 3]) == "1 22 3"


def test_unique_identifiers_are_json(gpt2_files):
    folder, _ = gpt2_files
    tokenizer = build_tokenizer(gpt2(folder))
    assert json.loads(json.dumps(tokenizer.unique_identifiers))["vocab_size"] == tokenizer.vocab_size


def test_no_pad_attribute():
    # megatron-core masks the loss where a label equals tokenizer.pad: without one it takes -1, which no label is.
    assert not hasattr(NullTokenizer(10), "pad")


@pytest.mark.parametrize("word", ["x", "1.5", "100", "-1"])
def test_null_tokenizer_refuses(word):
    with pytest.raises(ValueError, match=word.replace("-", "[-]")):
        NullTokenizer(100).tokenize(f"1 {word}")


def test_detokenize_refuses_padded_ids():
    with pytest.raises(ValueError, match=r"token id 128 is not in \[0, 100\)"):
        NullTokenizer(100).detokenize([1, 128])


@pytest.mark.parametrize("kind", ["BertTokenizer", None])
def test_unknown_type_lists_what_is_accepted(kind):
    with pytest.raises(ValueError, match=r"choose one of GPT2BPETokenizer, HuggingFaceTokenizer, .*TikTokenizer, NullTokenizer"):
        build_tokenizer(DataConfig(tokenizer_type=kind))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(tokenizer_type="GPT2BPETokenizer"), "--vocab-file is missing"),
        (DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="nowhere.json"), "--vocab-file nowhere.json does not exist"),
        (DataConfig(tokenizer_type="HuggingFaceTokenizer"), "--tokenizer-model is missing"),
        (DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="nowhere"), "--tokenizer-model nowhere does not exist"),
        (DataConfig(tokenizer_type="NullTokenizer"), "--vocab-size"),
    ],
)
def test_missing_files(config, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(config)


def test_huggingface_without_an_end_of_document(tmp_path):
    trained(end="[SEP]").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has none of .*</s>.*add one"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def test_damaged_huggingface_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def test_gpt2_without_all_bytes(gpt2_files):
    folder, _ = gpt2_files
    (folder / "encoder.json").write_text(json.dumps({END_OF_TEXT: 0, "t": 1, "h": 2, "th": 3}))
    (folder / "vocab.bpe").write_text("t h\n")
    with pytest.raises(ValueError, match="lacks 254 of the 256 bytes"):
        build_tokenizer(gpt2(folder))


def huggingface(folder, model, **parts):
    """Of a model with few letters and no way to spell the others, at `folder`."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


LETTERS = {"a": 0, "b": 1, "ab": 2}
NARROW = [
    models.BPE(vocab=LETTERS, merges=[("a", "b")]),
    models.BPE(vocab=LETTERS, merges=[("a", "b")], byte_fallback=True),
    models.BPE(vocab=LETTERS, merges=[("a", "b")], unk_token="<unk>"),
    models.WordLevel(vocab={"ab": 0}, unk_token="<unk>"),
    models.WordPiece(vocab={"ab": 0}, unk_token="<unk>"),
    models.Unigram([("a", -1.0), ("b", -2.0)]),
]


@pytest.mark.promise("Data", "Preprocessing refuses text that the tokenizer cannot encode.")
@pytest.mark.parametrize("model", NARROW, ids=[f"{type(model).__name__}-{i}" for i, model in enumerate(NARROW)])
def test_text_that_a_tokenizer_cannot_spell_is_refused(tmp_path, model):
    tokenizer = huggingface(tmp_path, model)
    assert tokenizer.tokenize("ab")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokenizer\.json (would drop 'z'|cannot encode the text)"):
            tokenizer.tokenize("abz")


def test_what_a_tokenizer_takes_away_on_purpose_is_not_missed(tmp_path):
    model = models.BPE(vocab=LETTERS, merges=[("a", "b")])
    tokenizer = huggingface(tmp_path, model, normalizer=normalizers.Lowercase(), pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    assert tokenizer.tokenize("AB  ab\n") == [2, 2]


def test_a_panic_of_the_library_is_one_line(tmp_path):
    class Panic(BaseException):
        pass

    class Panicking:
        def encode(self, *_, **__):
            raise Panic("no entry found for key")

    tokenizer = huggingface(tmp_path, models.Unigram([("a", -1.0)]))
    tokenizer._tokenizer = Panicking()
    with pytest.raises(ValueError, match=r"cannot encode the text, .*no entry found for key"):
        tokenizer.tokenize("a")


@pytest.mark.parametrize("largest", [2**31, 2**32 - 1])
def test_ids_from_two_to_the_31(tmp_path, largest):
    trained().save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["far away"] = largest
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"is {largest}: ids must be less than 2\^31"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    with pytest.raises(ValueError, match=rf"is {largest}: ids must be less than 2\^31"):
        build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab_size=largest + 1)


@pytest.mark.promise("Data", "Settings of another tokenizer are refused.")
def test_settings_of_another_tokenizer_are_refused(gpt2_files):
    folder, reference = gpt2_files
    reference.save(str(folder / "tokenizer.json"))
    whole = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    with pytest.raises(
        ValueError,
        match="--vocab-size 50 belongs to NullTokenizer, TikTokenizer and has no effect with --tokenizer-type HuggingFaceTokenizer",
    ):
        build_tokenizer(whole, vocab_size=50)
    with pytest.raises(ValueError, match="--vocab-file v belongs to GPT2BPETokenizer"):
        build_tokenizer(dataclasses.replace(whole, vocab_file="v"))
    with pytest.raises(ValueError, match="--tokenizer-model m belongs to HuggingFaceTokenizer"):
        build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", tokenizer_model="m"), vocab_size=50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiktoken_pattern": "v2"}, "--tiktoken-pattern v2 belongs to TikTokenizer"),
        ({"tiktoken_num_special_tokens": 5}, "--tiktoken-num-special-tokens 5 belongs to TikTokenizer"),
        ({"tokenizer_special_tokens": ("<s>", "</s>")}, "--tokenizer-special-tokens <s> </s> belongs to TikTokenizer"),
        ({"legacy_tokenizer": True}, "--legacy-tokenizer belongs to SentencePieceTokenizer, Llama2Tokenizer and has no effect"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m", **settings))


def test_a_folder_s_eos_token_ends_a_document_as_in_megatron_lm(tmp_path):
    """Of an instruct model, whose vocabulary has the base model's end of text too."""
    reference = trained()
    reference.add_special_tokens(["<|im_end|>"])
    reference.save(str(tmp_path / "tokenizer.json"))
    whole = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert build_tokenizer(whole).eod == 0
    for eos in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert build_tokenizer(whole).eod == reference.token_to_id("<|im_end|>")
    alone = dataclasses.replace(whole, tokenizer_model=str(tmp_path / "tokenizer.json"))
    assert build_tokenizer(alone).eod == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token": "<gone>"}', "has none of <gone>"),
        ('{"eos_token": 3}', "tokenizer_config.json has eos_token 3; it must be a token's text"),
        ("[]", "its tokenizer_config.json cannot be read"),
        ("{", "its tokenizer_config.json cannot be read"),
        ('{"eos_token": {}}', "its tokenizer_config.json cannot be read"),
    ],
)
def test_a_damaged_tokenizer_config_is_refused(tmp_path, content, message):
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("encoder.json", "{", "is not a JSON object of token to id"),
        ("encoder.json", '["a"]', "is not a JSON object of token to id"),
        ("encoder.json", '{"a": 0}', "has no <|endoftext|>"),
        ("encoder.json", '{"<|endoftext|>": 0, "\u4e00": 1}', "byte alphabet"),
        ("vocab.bpe", "", "is not a list of merges"),
        ("vocab.bpe", "t h e\n", "is not a list of merges"),
        ("vocab.bpe", "q q\n", "does not belong to --vocab-file"),
    ],
)
def test_damaged_gpt2_files(gpt2_files, name, content, message):
    folder, _ = gpt2_files
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        build_tokenizer(gpt2(folder))


def test_words_begin_where_the_vocabulary_says_so(tmp_path: Path):
    """Byte-level BPE and SentencePiece mark the space before a word, WordPiece what goes on; masks are found by their spelling."""

    def of(vocabulary: list[str]) -> HuggingFaceTokenizer:
        table = {token: i for i, token in enumerate(vocabulary)}
        model = models.WordPiece(table, unk_token="[UNK]")
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        tokenizers.Tokenizer(model).save(str(path))
        return HuggingFaceTokenizer(path)

    pieces = of(["[UNK]", "[MASK]", "</s>", "play", "##ing"])
    assert pieces.word_begins().tolist() == [True, True, True, True, False]
    assert pieces.mask == 1
    spaces = of(["[UNK]", "</s>", "\u0120play", "ing", "\u2581on", "\u010a"])
    assert spaces.word_begins().tolist() == [False, False, True, False, True, True]
    assert spaces.mask is None
    assert NullTokenizer(3).word_begins().tolist() == [True] * 3


def test_a_file_that_truncates_and_pads_drops_and_adds_nothing(tmp_path: Path):
    """As files of classifiers do; a padding of 10^12 tokens would take all memory."""
    tokenizer = trained()
    tokenizer.save(str(tmp_path / "plain.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10**12)
    tokenizer.save(str(tmp_path / "cut.json"))
    plain, cut = (HuggingFaceTokenizer(tmp_path / f"{name}.json") for name in ("plain", "cut"))
    text = "the quick brown fox " * 3
    assert cut.tokenize(text) == plain.tokenize(text)
    assert len(plain.tokenize(text)) > 3


def test_a_text_that_a_normalizer_multiplies_is_refused(tmp_path: Path):
    """Below the bound of the file, and above that of a text."""
    tokenizer = trained()
    tokenizer.normalizer = tokenizers.normalizers.Replace("q", "x" * 4000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert opened.tokenize("the fox")
    with pytest.raises(ValueError, match=r"cannot encode the text: its normalizer makes \d+ bytes of the 22 of 'the quick brown fox '"):
        opened.tokenize("the quick brown fox qq")
