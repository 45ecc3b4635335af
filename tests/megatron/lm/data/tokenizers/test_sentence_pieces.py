"""SentencePiece tokenizers against megatron-core's, the legacy ones against Megatron-LM's rules, and every bad input."""

import pickle
import sys
from pathlib import Path

import pytest

from helpers.tokenizer_files import TEXT, sentence_pieces
from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import Tokenizer, build_tokenizer

KINDS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def of(path: Path, kind: str = "Llama2Tokenizer", **settings: bool) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(path), **settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_pieces(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_megatron_core(model: Path, kind: str):
    from megatron.core.tokenizers import MegatronTokenizer

    theirs = MegatronTokenizer.from_pretrained(tokenizer_path=str(model), metadata_path={"library": "sentencepiece"}, legacy=False)
    ours = of(model, kind)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (360, 2)
    assert ours.tokenize(TEXT) == theirs.tokenize(TEXT)
    assert ours.detokenize(ours.tokenize(TEXT)) == TEXT


def test_the_legacy_sentencepiece_tokenizer_adds_special_tokens_and_ends_with_eod(model: Path, tmp_path: Path):
    """<CLS> <SEP> <EOD> <MASK>, then a pad, bos or eos that the model lacks, each behind the last id (Megatron-LM's tokenizer.py)."""
    ours = of(model, "SentencePieceTokenizer", legacy_tokenizer=True)
    assert (ours.vocab_size, ours.eod, ours.mask) == (365, 362, 363)
    ids = ours.tokenize(TEXT)
    assert ids == of(model).tokenize(TEXT)
    assert ours.detokenize([*ids, 362, *ids, 364]) == f"{TEXT}<EOD>{TEXT}<PAD>"
    whole = of(sentence_pieces(tmp_path, pad_id=3, user_defined_symbols=["<EOD>"]), "SentencePieceTokenizer", legacy_tokenizer=True)
    assert whole.vocab_size == 363
    assert whole.detokenize([whole.eod]) == "<EOD>"
    assert whole.eod < 360


def test_the_legacy_llama_2_tokenizer_begins_with_bos(model: Path):
    assert of(model, legacy_tokenizer=True).tokenize(TEXT) == [1, *of(model).tokenize(TEXT)]
    assert of(model, legacy_tokenizer=True).detokenize([1, *of(model).tokenize(TEXT)]) == TEXT


def test_the_spelling_of_a_special_token_is_text(model: Path):
    for legacy in (False, True):
        ours = of(model, "SentencePieceTokenizer", legacy_tokenizer=legacy)
        ids = ours.tokenize("a </s> b <EOD> c")
        assert ours.eod not in ids
        assert ours.detokenize(ids) == "a </s> b <EOD> c"


def test_words_begin_with_the_mark_of_a_space(model: Path):
    ours = of(model, "SentencePieceTokenizer", legacy_tokenizer=True)
    begins = ours.word_begins()
    ids = ours.tokenize("the state\nx")
    texts = [ours._model.id_to_piece(i) for i in ids]
    assert [bool(begins[i]) for i in ids] == [text.startswith("\u2581") or text == "<0x0A>" for text in texts]
    assert begins[[1, 2, 360, 364]].all()


def test_it_is_pickled_to_readers_that_are_spawned(model: Path):
    assert pickle.loads(pickle.dumps(of(model))).tokenize(TEXT) == of(model).tokenize(TEXT)


def test_padded_ids_are_refused(model: Path):
    with pytest.raises(ValueError, match=r"token id 360 is not in \[0, 360\)"):
        of(model).detokenize([1, 360])


@pytest.mark.parametrize(("content", "message"), [(b"", "is not a SentencePiece model"), (b"{}", "is not a SentencePiece model")])
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        of(tmp_path / "tokenizer.model")


def test_a_model_without_the_tokens_it_needs_is_refused(tmp_path: Path):
    bare = sentence_pieces(tmp_path, eos_id=-1, bos_id=-1)
    with pytest.raises(ValueError, match="has no eos token, which ends a document: train the model with one, or use --legacy-tokenizer"):
        of(bare, "GPTSentencePieceTokenizer")
    with pytest.raises(ValueError, match="has no bos token, which --legacy-tokenizer puts before each text: drop the flag"):
        of(bare, legacy_tokenizer=True)
    assert of(bare, "SentencePieceTokenizer", legacy_tokenizer=True).vocab_size == 367


def test_a_missing_library_is_named(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        ValueError, match=r"--tokenizer-type Llama2Tokenizer needs the package sentencepiece \(.*\): pip install sentencepiece"
    ):
        of(model)


def test_a_text_that_is_no_unicode_is_refused(model: Path):
    with pytest.raises(ValueError, match="cannot encode the text"):
        of(model).tokenize("a\ud800b")
