"""Tokenizers behind `--tokenizer-type`: GPT-2 BPE (tiktoken), Hugging Face `tokenizer.json`, and plain integers.

Neither torch nor megatron-core is imported here, so that a preprocessing worker starts in a fraction of a second.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron.lm.config import DataConfig
from megatron.lm.config.rules.data import strange_settings

MOST_TOKENS = 2**31  # ids are int32, on disk too
END_OF_TEXT = "<|endoftext|>"
MASK_CANDIDATES = ("<mask>", "[MASK]", "<|mask|>")
SPACES = ("\u0120", "\u2581", "\u010a", "\u0109")  # how byte-level BPE and SentencePiece spell a space, a line's end and a tab in a token
EOD_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# GPT-2's word splitter, as published with its vocabulary; possessive quantifiers would change nothing but speed.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer(abc.ABC):
    """Text to token ids and back; also the interface that megatron-core's GPTDataset expects of a tokenizer.

    Attributes:
        vocab_size: number of ids; every id is in [0, vocab_size). The model may pad it further.
        eod: id that ends a document.
        mask: id that stands for a hidden token in masked language modelling; None where the vocabulary has none.
    """

    vocab_size: int
    eod: int
    mask: int | None = None

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`; a special token's spelling inside the text is taken as ordinary text."""

    @abc.abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """Text of `ids`; ValueError for an id outside [0, vocab_size)."""

    @abc.abstractmethod
    def word_begins(self) -> np.ndarray:
        """[vocab_size] bool: the ids with which a word begins."""

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The tokenizer's part of megatron-core's key of an index cache: JSON-able, and the same on every machine."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}

    def _check_ids(self, ids: list[int]) -> None:
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is not in [0, {self.vocab_size}): mask the padding of the vocabulary before sampling")


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from its two files (`encoder.json`, `vocab.bpe`), run by tiktoken."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        import tiktoken  # deferred: the other tokenizers do without it

        encoder = _read_json(vocab_file, "--vocab-file", "a JSON object of token to id, as GPT-2's encoder.json")
        if END_OF_TEXT not in encoder:
            raise ValueError(f"--vocab-file {vocab_file} has no {END_OF_TEXT}: give the encoder.json that belongs to the merges")
        ranks = {_token_bytes(token, vocab_file): rank for token, rank in encoder.items() if token != END_OF_TEXT}
        _check_merges(encoder, merge_file)
        self.eod = encoder[END_OF_TEXT]
        self.vocab_size = len(encoder)
        if sorted(encoder.values()) != list(range(self.vocab_size)):
            raise ValueError(f"--vocab-file {vocab_file}: ids must be 0..{self.vocab_size - 1}, each once; the file is damaged")
        lacking = sum(bytes([byte]) not in ranks for byte in range(256))
        if lacking:
            raise ValueError(
                f"--vocab-file {vocab_file} lacks {lacking} of the 256 bytes, and could not spell every text: give a whole one"
            )
        self._encoding = tiktoken.Encoding(
            "gpt2-bpe",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.eod},
            explicit_n_vocab=self.vocab_size,
        )

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        return self._encoding.decode(ids)

    def word_begins(self) -> np.ndarray:
        texts = (b" " if i == self.eod else self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size))
        return np.array([text[:1].isspace() for text in texts])


class HuggingFaceTokenizer(Tokenizer):
    """Any `tokenizer.json` of the `tokenizers` library; the end of a document is the first of EOD_CANDIDATES it knows."""

    def __init__(self, path: Path) -> None:
        import tokenizers  # deferred: the other tokenizers do without it

        with _told(f"--tokenizer-model {path} is not a tokenizer.json of the tokenizers library"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._path, model = path, self._tokenizer.model
        # Such a model leaves out text that it cannot spell; every other one has a token for it or fails.
        self._drops = isinstance(model, tokenizers.models.BPE) and model.unk_token is None
        self._spelt: set[str] = set()  # characters known not to be left out
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Added tokens may leave gaps, so the number of entries can be below the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        eod = next((vocabulary[token] for token in EOD_CANDIDATES if token in vocabulary), None)
        if eod is None:
            raise ValueError(f"--tokenizer-model {path} has none of {', '.join(EOD_CANDIDATES)}: add one to it as a special token")
        self.eod = eod
        self.mask = next((vocabulary[token] for token in MASK_CANDIDATES if token in vocabulary), None)

    def word_begins(self) -> np.ndarray:
        """By the mark that the vocabulary has for it: of a space before the token, or of none ("##")."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        goes_on = any(token.startswith("##") and len(token) > 2 for token in vocabulary)
        begins = np.ones(self.vocab_size, dtype=bool)  # added tokens are words
        for token, i in vocabulary.items():
            begins[i] = not token.startswith("##") if goes_on else token.startswith(SPACES)
        return begins

    def tokenize(self, text: str) -> list[int]:
        with _told(f"--tokenizer-model {self._path} cannot spell the text, and has no unknown token for it"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._drops:
            self._check_spelt(set(text) - self._spelt)
        return ids

    def _check_spelt(self, characters: set[str]) -> None:
        """ValueError for a character that the model leaves out; characters that the normalizer or pre-tokenizer removes go on purpose."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        for character in characters:
            seen = normalizer.normalize_str(character) if normalizer is not None else character
            pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(seen)] if pre_tokenizer is not None else [seen]
            if any(pieces) and not self._tokenizer.encode(character, add_special_tokens=False).ids:
                raise ValueError(
                    f"--tokenizer-model {self._path} would leave out {character!r} (U+{ord(character):04X}): it has neither an unknown "
                    "token nor all bytes; give one that spells every text, or clean the text"
                )
        self._spelt |= characters

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        with _told(f"--tokenizer-model {self._path} cannot read the ids back"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


class NullTokenizer(Tokenizer):
    """Text that is already ids: whitespace-separated integers in [0, vocab_size - 1), the last id being eod."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"--vocab-size {vocab_size} must be at least 2 for NullTokenizer (one id and the end of document)")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer takes whitespace-separated integers: {error}") from None
        self._check_ids(ids)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        return " ".join(map(str, ids))

    def word_begins(self) -> np.ndarray:
        return np.ones(self.vocab_size, dtype=bool)


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer-type` and its files name.

    Args:
        data: tokenizer_type, vocab_file, merge_file, tokenizer_model.
        vocab_size: `--vocab-size`; NullTokenizer needs it, the others know their own.

    Raises:
        ValueError: unknown type, a setting of another type, a file not given, missing or damaged, ids from 2^31; the message lists
            what is accepted.
    """
    builder = _BUILDERS.get(data.tokenizer_type or "")
    if builder is None:
        raise ValueError(f"--tokenizer-type {data.tokenizer_type} is unknown: choose one of {', '.join(_BUILDERS)}")
    for problem in strange_settings(data, vocab_size):
        raise ValueError(problem)
    tokenizer = builder(data, vocab_size)
    if tokenizer.vocab_size > MOST_TOKENS:
        raise ValueError(f"the vocabulary of {data.tokenizer_type} reaches to {tokenizer.vocab_size - 1}: ids must be below 2^31")
    return tokenizer


@contextlib.contextmanager
def _told(message: str) -> Iterator[None]:
    """Turns the errors of a library in Rust into a ValueError: a bare Exception, or a panic, which is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{message}: {error}") from None


def _build_gpt2(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    return GPT2BPETokenizer(_file(data.vocab_file, "--vocab-file", "encoder.json"), _file(data.merge_file, "--merge-file", "vocab.bpe"))


def _build_huggingface(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    path = data.tokenizer_model
    if path is not None and Path(path).is_dir():
        path = str(Path(path) / "tokenizer.json")
    return HuggingFaceTokenizer(_file(path, "--tokenizer-model", "a tokenizer.json or a folder with one"))


def _build_null(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None:
        raise ValueError("NullTokenizer has no vocabulary of its own: give --vocab-size N (ids 0..N-1, N-1 ends a document)")
    return NullTokenizer(vocab_size)


_BUILDERS: dict[str, Callable[[DataConfig, int | None], Tokenizer]] = {
    "GPT2BPETokenizer": _build_gpt2,
    "HuggingFaceTokenizer": _build_huggingface,
    "NullTokenizer": _build_null,
}


def _file(path: str | None, flag: str, wanted: str) -> Path:
    if path is None:
        raise ValueError(f"{flag} is missing: it names {wanted}")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path} does not exist: it names {wanted}")
    return Path(path)


def _read_json(path: Path, flag: str, wanted: str) -> dict[str, int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} {path} is not {wanted}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(value, int) for value in content.values()):
        raise ValueError(f"{flag} {path} is not {wanted}")
    return cast("dict[str, int]", content)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: visible Latin-1 stands for itself, the rest moves to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def _token_bytes(token: str, vocab_file: Path) -> bytes:
    try:
        return bytes(_byte_alphabet()[character] for character in token)
    except KeyError as error:
        raise ValueError(f"--vocab-file {vocab_file}: token {token!r} holds {error}, which GPT-2's byte alphabet lacks") from None


def _check_merges(encoder: dict[str, int], merge_file: Path) -> None:
    """tiktoken merges in the order of ids, so the merge list must ask for just that order: else ValueError."""
    lines = merge_file.read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#version")]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--merge-file {merge_file} is not a list of merges, two tokens a line, as GPT-2's vocab.bpe")
    ids = [encoder.get(first + second, -1) for first, second in pairs]
    if -1 in ids or any(a >= b for a, b in itertools.pairwise(ids)):
        raise ValueError(f"--merge-file {merge_file} does not belong to --vocab-file: its merges are not the vocabulary's, in order of id")
