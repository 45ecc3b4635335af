"""transformers reads the tokenizer's files and makes the same ids of a text."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from helpers.hf_models import config
from helpers.tokenizer_files import sentence_pieces, token_list
from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT, build_tokenizer
from megatron.lm.tools.convert import tokenizer_files
from megatron.lm.tools.convert.tokenizer_files import settings_in, write

TEXT = "It's the state of the union: 1,234 words - naïve façade.\n\n  the the 🙂 end"


def matching(settings, size):
    return tokenizer_files.matching(settings.data, settings.model.vocab_size, size)


@pytest.fixture
def sources(tmp_path):
    """A byte-level BPE trained here, as GPT-2's two files and as tokenizer.json; the settings of both."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    source = tmp_path / "source"
    source.mkdir()
    (source / "encoder.json").write_text(json.dumps(content["vocab"]), encoding="utf-8")
    (source / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    tokenizer.save(str(source / "tokenizer.json"))
    files = {"vocab_file": str(source / "encoder.json"), "merge_file": str(source / "vocab.bpe")}
    return {
        "GPT2BPETokenizer": {"tokenizer_type": "GPT2BPETokenizer", **files},
        "HuggingFaceTokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(source)},
    }


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HuggingFaceTokenizer"])
def test_transformers_makes_the_same_ids(sources, kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = config("gpt2", vocab_size=None, **sources[kind])
    ours = build_tokenizer(settings.data)
    assert matching(settings, ours.vocab_size).vocab_size == ours.vocab_size
    out = tmp_path / "out"
    out.mkdir()
    write(settings.data, settings.model.max_positions, ours, out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT)["input_ids"] == ours.tokenize(TEXT)
    assert theirs.decode(ours.tokenize(TEXT)) == TEXT
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eod
    assert theirs.model_max_length == 16
    again = build_tokenizer(settings_in(out))
    assert settings_in(out).tokenizer_type == kind
    assert again.tokenize(TEXT) == ours.tokenize(TEXT)


def test_a_null_tokenizer_has_no_files(tmp_path):
    settings = config("gpt2")
    write(settings.data, settings.model.max_positions, matching(settings, 60), tmp_path)
    assert not list(tmp_path.iterdir())
    assert settings_in(tmp_path) == DataConfig(tokenizer_type="NullTokenizer")


def test_another_vocabulary_and_lost_files_are_refused(sources):
    with pytest.raises(ValueError, match="the tokenizer has 60 tokens, but the checkpoint has 61: give the files"):
        matching(config("gpt2"), 61)
    lost = sources["GPT2BPETokenizer"] | {"vocab_file": "nowhere.json"}
    with pytest.raises(ValueError, match=r"--vocab-file nowhere.json does not exist"):
        matching(config("gpt2", vocab_size=None, **lost), 60)


@pytest.mark.parametrize("legacy", [False, True])
def test_transformers_makes_the_same_ids_from_a_model_like_llama_2_s(legacy, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = sentence_pieces(tmp_path)
    settings = config("llama", vocab_size=None, tokenizer_type="Llama2Tokenizer", tokenizer_model=str(model), legacy_tokenizer=legacy)
    ours = matching(settings, 360)
    out = tmp_path / "out"
    out.mkdir()
    write(settings.data, settings.model.max_positions, ours, out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT)["input_ids"] == ours.tokenize(TEXT)
    assert theirs.decode(ours.tokenize(TEXT), skip_special_tokens=True) == TEXT
    assert (theirs.eos_token_id, len(theirs)) == (ours.eod, ours.vocab_size)
    assert settings_in(out) == DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(out / "tokenizer.model"))


def test_tokenizers_that_transformers_reads_otherwise_are_refused(tmp_path):
    tokens = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(token_list(tmp_path)), "tiktoken_num_special_tokens": 20}
    with pytest.raises(ValueError, match="TikTokenizer"):
        matching(config("llama", vocab_size=336, **tokens), 336)
    changes = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    cleaned = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(sentence_pieces(tmp_path, **changes))}
    with pytest.raises(ValueError, match="SentencePieceTokenizer"):
        matching(config("llama", vocab_size=None, **cleaned), 360)
    added = cleaned | {"tokenizer_model": str(sentence_pieces(tmp_path)), "legacy_tokenizer": True}
    with pytest.raises(ValueError, match="SentencePieceTokenizer"):
        matching(config("llama", vocab_size=None, **added), 365)
