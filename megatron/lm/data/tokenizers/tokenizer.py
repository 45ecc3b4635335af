"""Tokenizers of `--tokenizer-type`: the interface, Hugging Face `tokenizer.json`, and plain integers. The others are in `byte_pairs` and
`sentence_pieces`.

This module imports neither torch nor megatron-core, so that a preprocessing worker starts in a fraction of a second.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.lm.config import DataConfig
from megatron.lm.config.rules.data import strange_settings
from megatron.lm.data.tokenizers.tokenizer_json import UNCHECKED, check_text, read_tokenizer_json

MOST_TOKENS = 2**31  # ids are int32, also on disk
END_OF_TEXT = "<|endoftext|>"
MASK_CANDIDATES = ("<mask>", "[MASK]", "<|mask|>")
SPACES = ("\u0120", "\u2581", "\u010a", "\u0109")  # how byte-level BPE and SentencePiece spell space, newline and tab in a token
EOD_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(abc.ABC):
    """Convert text to token ids and back; also the tokenizer interface that megatron-core's GPTDataset expects.

    Attributes:
        vocab_size: number of ids; every id is in [0, vocab_size). The model may pad it further.
        eod: end-of-document id.
        mask: id of the mask token in masked language modeling; None if the vocabulary has none.
    """

    vocab_size: int
    eod: int
    mask: int | None = None

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`; the spelling of a special token inside the text is ordinary text."""

    @abc.abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids`; ValueError for an id outside [0, vocab_size)."""

    @abc.abstractmethod
    def word_begins(self) -> np.ndarray:
        """Return [vocab_size] bool: whether a word begins with this id."""

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Return the tokenizer's part of megatron-core's index cache key: JSON-serializable, and equal on all machines."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}

    def _check_ids(self, ids: list[int]) -> None:
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is not in [0, {self.vocab_size}): mask the padding of the vocabulary before sampling")


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer from any `tokenizer.json` of the `tokenizers` library.

    Args:
        path: the file.
        eod: the token that ends a document; None: the first of EOD_CANDIDATES in the vocabulary.
    """

    def __init__(self, path: Path, eod: str | None = None) -> None:
        tokenizers = library("tokenizers", "HuggingFaceTokenizer")

        with one_line(f"--tokenizer-model {path} is not a tokenizer.json of the tokenizers library"):
            content, self._growth = read_tokenizer_json(path)
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()  # a file for classification may truncate, which would drop text
        self._tokenizer.no_padding()
        self._path, model = path, self._tokenizer.model
        # Such a model drops text that it cannot encode; all others have an unknown token or fail.
        self._drops = isinstance(model, tokenizers.models.BPE) and model.unk_token is None
        self._spelt: set[str] = set()  # characters known not to be dropped
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Added tokens may leave gaps, so the number of entries can be below the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        candidates = EOD_CANDIDATES if eod is None else (eod,)
        eod_id = next((vocabulary[token] for token in candidates if token in vocabulary), None)
        if eod_id is None:
            raise ValueError(f"--tokenizer-model {path} has none of {', '.join(candidates)}: add one to it as a special token")
        self.eod = eod_id
        self.mask = next((vocabulary[token] for token in MASK_CANDIDATES if token in vocabulary), None)

    def word_begins(self) -> np.ndarray:
        """Use the vocabulary's mark: of a space before the token, or of no space ("##")."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        goes_on = any(token.startswith("##") and len(token) > 2 for token in vocabulary)
        begins = np.ones(self.vocab_size, dtype=bool)  # added tokens are words
        for token, i in vocabulary.items():
            begins[i] = not token.startswith("##") if goes_on else token.startswith(SPACES)
        return begins

    def tokenize(self, text: str) -> list[int]:
        if self._growth > UNCHECKED:
            with one_line(f"--tokenizer-model {self._path} cannot encode the text"):
                check_text(text, self._tokenizer.normalizer.normalize_str)
        with one_line(f"--tokenizer-model {self._path} cannot encode the text, and has no unknown token"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._drops:
            self._check_spelt(set(text) - self._spelt)
        return ids

    def _check_spelt(self, characters: set[str]) -> None:
        """Raise a ValueError for a character that the model drops. Characters that the normalizer or pre-tokenizer removes are intended."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        for character in characters:
            seen = normalizer.normalize_str(character) if normalizer is not None else character
            pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(seen)] if pre_tokenizer is not None else [seen]
            if any(pieces) and not self._tokenizer.encode(character, add_special_tokens=False).ids:
                raise ValueError(
                    f"--tokenizer-model {self._path} would drop {character!r} (U+{ord(character):04X}): it has neither an unknown "
                    "token nor all bytes; use a tokenizer that encodes every text, or clean the text"
                )
        self._spelt |= characters

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        with one_line(f"--tokenizer-model {self._path} cannot decode the ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


class NullTokenizer(Tokenizer):
    """Tokenizer for text that is already ids: whitespace-separated integers in [0, vocab_size - 1); the last id is eod."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"--vocab-size {vocab_size} must be at least 2 for NullTokenizer (one id and the end of document)")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer needs whitespace-separated integers: {error}") from None
        self._check_ids(ids)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        return " ".join(map(str, ids))

    def word_begins(self) -> np.ndarray:
        return np.ones(self.vocab_size, dtype=bool)


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of `--tokenizer-type` and its files.

    Args:
        data: tokenizer_type and its settings.
        vocab_size: `--vocab-size`; required by NullTokenizer, optional for TikTokenizer, unused by the others.

    Raises:
        ValueError: unknown type, a setting of another type, a file that is not set, missing or damaged, or ids of 2^31 or more; the
            message lists what is accepted.
    """
    builder = _BUILDERS.get(data.tokenizer_type or "")
    if builder is None:
        raise ValueError(f"--tokenizer-type {data.tokenizer_type} is unknown: choose one of {', '.join(_BUILDERS)}")
    for problem in strange_settings(data, vocab_size):
        raise ValueError(problem)
    tokenizer = builder(data, vocab_size)
    if tokenizer.vocab_size > MOST_TOKENS:
        raise ValueError(f"the largest id of {data.tokenizer_type} is {tokenizer.vocab_size - 1}: ids must be less than 2^31")
    return tokenizer


def library(name: str, kind: str) -> Any:
    """Import the module `name` for a tokenizer; if it is missing, raise a ValueError with the command to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--tokenizer-type {kind} needs the package {name} ({error}): pip install {name}") from None


@contextlib.contextmanager
def one_line(message: str) -> Iterator[None]:
    """Convert errors of a Rust library to a ValueError: a bare Exception, or a panic, which is not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{message}: {error}") from None


def _build_gpt2(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    from megatron.lm.data.tokenizers.byte_pairs import GPT2BPETokenizer

    return GPT2BPETokenizer(_file(data.vocab_file, "--vocab-file", "encoder.json"), _file(data.merge_file, "--merge-file", "vocab.bpe"))


def _build_huggingface(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    path, eod = data.tokenizer_model, None
    if path is not None and Path(path).is_dir():
        path, eod = str(Path(path) / "tokenizer.json"), _eos_token(Path(path) / "tokenizer_config.json")
    return HuggingFaceTokenizer(_file(path, "--tokenizer-model", "a tokenizer.json or a folder with one"), eod)


def _eos_token(path: Path) -> str | None:
    """Return `eos_token` of a tokenizer_config.json, which ends a document in Megatron-LM; None if there is none."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        eos = content.get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"--tokenizer-model {path.parent}: its {path.name} cannot be read ({error}): fix it, or use only tokenizer.json"
        ) from None
    if eos is not None and not isinstance(eos, str):
        raise ValueError(f"--tokenizer-model {path.parent}: {path.name} has eos_token {eos!r}; it must be a token's text")
    return eos


def _build_sentencepiece(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    from megatron.lm.data.tokenizers.sentence_pieces import SentencePieceTokenizer

    path = _file(data.tokenizer_model, "--tokenizer-model", "a SentencePiece model (tokenizer.model)")
    return SentencePieceTokenizer(path, str(data.tokenizer_type), legacy=data.legacy_tokenizer)


def _build_tiktoken(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    from megatron.lm.data.tokenizers.byte_pairs import TikTokenizer

    return TikTokenizer(
        _file(data.tokenizer_model, "--tokenizer-model", "a JSON list of tokens"),
        vocab_size=vocab_size,
        pattern=data.tiktoken_pattern,
        num_special_tokens=data.tiktoken_num_special_tokens,
        special_tokens=data.tokenizer_special_tokens,
    )


def _build_llama3(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    from megatron.lm.data.tokenizers.byte_pairs import Llama3Tokenizer

    if data.tokenizer_model is not None and (Path(data.tokenizer_model).is_dir() or data.tokenizer_model.endswith(".json")):
        return _build_huggingface(data, vocab_size)
    return Llama3Tokenizer(_file(data.tokenizer_model, "--tokenizer-model", "Llama 3's tokenizer.model"))


def _build_null(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None:
        raise ValueError("NullTokenizer has no vocabulary: set --vocab-size N (ids 0..N-1, where N-1 ends a document)")
    return NullTokenizer(vocab_size)


_BUILDERS: dict[str, Callable[[DataConfig, int | None], Tokenizer]] = {
    "GPT2BPETokenizer": _build_gpt2,
    "HuggingFaceTokenizer": _build_huggingface,
    "SentencePieceTokenizer": _build_sentencepiece,
    "GPTSentencePieceTokenizer": _build_sentencepiece,
    "Llama2Tokenizer": _build_sentencepiece,
    "Llama3Tokenizer": _build_llama3,
    "TikTokenizer": _build_tiktoken,
    "NullTokenizer": _build_null,
}


def _file(path: str | None, flag: str, wanted: str) -> Path:
    if path is None:
        raise ValueError(f"{flag} is missing: set it to {wanted}")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path} does not exist: expected {wanted}")
    return Path(path)
