"""Tokenizers of `--tokenizer-type`: a thin adapter of the libraries `tokenizers`, `sentencepiece` and `tiktoken`.

megatron-core has classes for the same files, but they need transformers for a `tokenizer.json`, treat special tokens inside a text as such,
and look names up on a hub. Here only files are read, no code of a folder runs, and the spelling of a special token is ordinary text.

    HuggingFaceTokenizer                   any tokenizer.json
    SentencePieceTokenizer and two others  a SentencePiece model; `--legacy-tokenizer` as Megatron-LM before megatron-core had tokenizers
    GPT2BPETokenizer                       encoder.json and vocab.bpe
    TikTokenizer                           Megatron-LM's JSON list of tokens, behind ids for special tokens
    Llama3Tokenizer                        Llama 3's tokenizer.model, before ids for special tokens
    NullTokenizer                          text that is already ids

This module imports neither torch nor megatron-core, so that a preprocessing worker starts in a fraction of a second.
"""

from __future__ import annotations

import abc
import base64
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.lm.config import DataConfig
from megatron.lm.config.rules.data import strange_settings
from megatron.lm.shell.exit_codes import one_line

MOST_TOKENS = 2**31  # ids are int32, also on disk
END_OF_TEXT = "<|endoftext|>"
MASK_CANDIDATES = ("<mask>", "[MASK]", "<|mask|>")
EOD_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_SPACES = ("\u0120", "\u2581", "\u010a", "\u0109")  # how byte-level BPE and SentencePiece spell space, newline and tab in a token
_TIKTOKEN_VOCABULARY, _TIKTOKEN_SPECIAL = 2**17, 1000  # Megatron-LM's defaults
_TIKTOKEN_NAMES = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_LLAMA3_SPECIAL = 256  # reserved ids after the merged tokens; Llama 3 uses the first ones

# How a text is split into words, within which tokens merge. GPT-2's is as published; possessive quantifiers would only change the speed.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TIKTOKEN_PATTERNS = {  # --tiktoken-pattern
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


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
        tokenizers = _library("tokenizers", "HuggingFaceTokenizer")
        with one_line(f"--tokenizer-model {path} is not a tokenizer.json of the tokenizers library"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
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
            begins[i] = not token.startswith("##") if goes_on else token.startswith(_SPACES)
        return begins

    def tokenize(self, text: str) -> list[int]:
        with one_line(f"--tokenizer-model {self._path} cannot encode the text"):
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


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, whose `eos` ends a document.

    Args:
        path: path of the model (`tokenizer.model`).
        kind: the value of `--tokenizer-type`.
        legacy: SentencePieceTokenizer adds special tokens after the model's ids, including `<EOD>`, which ends a document;
            Llama2Tokenizer begins each text with `bos`.

    Attributes:
        begins_with_bos: whether each text begins with `bos`.
    """

    def __init__(self, path: Path, kind: str, *, legacy: bool = False) -> None:
        sentencepiece = _library("sentencepiece", kind)
        with one_line(f"--tokenizer-model {path} is not a SentencePiece model"):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._path = path
        pieces = [self._model.id_to_piece(i) for i in range(self._model.vocab_size())]
        named = {piece: i for i, piece in enumerate(pieces)}
        self.begins_with_bos = legacy and kind == "Llama2Tokenizer"
        if self.begins_with_bos and self._model.bos_id() < 0:
            raise ValueError(f"--tokenizer-model {path} has no bos token, which --legacy-tokenizer puts before each text: drop the flag")
        self._added: list[str] = []  # special tokens after the model's own
        adds = legacy and kind == "SentencePieceTokenizer"
        if adds:
            ends = ((self._model.pad_id(), "<PAD>"), (self._model.bos_id(), "<BOS>"), (self._model.eos_id(), "<EOS>"))
            wanted = ("<CLS>", "<SEP>", "<EOD>", "<MASK>", *(name for i, name in ends if i < 0))
            self._added = [token for token in wanted if token not in named]
            named |= {token: len(pieces) + i for i, token in enumerate(self._added)}
        self.vocab_size = len(pieces) + len(self._added)
        self.eod = named["<EOD>"] if adds else self._model.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {path} has no eos token, which ends a document: train the model with one, or use --legacy-tokenizer"
            )
        self.mask = next((named[token] for token in ("<MASK>", *MASK_CANDIDATES) if token in named), None)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the model's special tokens with the names of transformers."""
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(), "unk_token": self._model.unk_id()}
        return {name: self._model.id_to_piece(i) for name, i in ids.items() if i >= 0}

    @property
    def is_llama_s(self) -> bool:
        """Return whether the model only adds a space before a text, as Llama's models do, and no special tokens were added."""
        return not self._added and self._model.normalize("\ufb01  x ") == "\u2581\ufb01\u2581\u2581x\u2581"

    def tokenize(self, text: str) -> list[int]:
        with one_line(f"--tokenizer-model {self._path} cannot encode the text"):
            return [self._model.bos_id()] * self.begins_with_bos + self._model.encode(text)

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        own = self._model.vocab_size()
        runs = [list(run) for _, run in itertools.groupby(ids, key=own.__le__)]  # of ids of the model, and of added ones
        return "".join(self._model.decode(run) if run[0] < own else "".join(self._added[i - own] for i in run) for run in runs)

    def word_begins(self) -> np.ndarray:
        """Use the mark of a space before a piece; special tokens are words."""
        begins = np.ones(self.vocab_size, dtype=bool)
        for i in range(self._model.vocab_size()):
            piece = self._model.id_to_piece(i)
            blank = self._model.is_byte(i) and chr(int(piece[1:-1], 16)).isspace()
            begins[i] = self._model.is_control(i) or self._model.is_unknown(i) or blank or piece.startswith(_SPACES)
        return begins


class BytePairTokenizer(Tokenizer):
    """A byte-level BPE with its special tokens, encoded by tiktoken.

    Args:
        ranks: bytes of each merged token -> its id; merges happen in the order of ids. Must contain all single bytes.
        special: special token -> its id.
        eod: the special token that ends a document.
        pattern: regular expression that splits a text into words; tokens merge only within a word.
        kind: the value of `--tokenizer-type`.

    Raises:
        ValueError: one of the 256 bytes is missing.
    """

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], *, eod: str, pattern: str, kind: str) -> None:
        lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if lacking:
            raise ValueError(f"the tokens of --tokenizer-type {kind} lack {len(lacking)} of the 256 bytes, so they cannot spell every text")
        self.vocab_size, self.eod, self.mask = len(ranks) + len(special), special[eod], special.get("<mask>")
        self._kind, self._special = kind, frozenset(special.values())
        self._encoding = _library("tiktoken", kind).Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=self.vocab_size
        )

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return super().unique_identifiers | {"class": self._kind}

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        return self._encoding.decode(ids)

    def word_begins(self) -> np.ndarray:
        texts = (b" " if i in self._special else self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size))
        return np.array([text[:1].isspace() for text in texts])


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


def _library(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--tokenizer-type {kind} needs the package {name} ({error}): pip install {name}") from None


def _file(path: str | None, flag: str, wanted: str) -> Path:
    if path is None:
        raise ValueError(f"{flag} is missing: set it to {wanted}")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path} does not exist: expected {wanted}")
    return Path(path)


def _gpt2(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """Build GPT-2's byte-level BPE. tiktoken merges in the order of ids, so the merges must be in this order."""
    vocab_file = _file(data.vocab_file, "--vocab-file", "encoder.json")
    merge_file = _file(data.merge_file, "--merge-file", "vocab.bpe")
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that GPT-2 spells as Latin-1; the rest from U+0100 on
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    with one_line(f"--vocab-file {vocab_file} is not GPT-2's encoder.json, an object of token to id"):
        ids = {token: int(i) for token, i in json.loads(vocab_file.read_text(encoding="utf-8")).items()}
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"ids must be 0..{len(ids) - 1}, each once")
        special = {END_OF_TEXT: ids[END_OF_TEXT]}
        ranks = {bytes(alphabet[character] for character in token): i for token, i in ids.items() if token != END_OF_TEXT}
    with one_line(f"--merge-file {merge_file} is not the vocab.bpe of --vocab-file, with two tokens per line in the order of ids"):
        lines = merge_file.read_text(encoding="utf-8").splitlines()
        pairs = [line.split() for line in lines if line and not line.startswith("#version")]
        merged = [ids[first + second] for first, second in pairs]
        if not merged or any(a >= b for a, b in itertools.pairwise(merged)):
            raise ValueError("its merges are in another order")
    return BytePairTokenizer(ranks, special, eod=END_OF_TEXT, pattern=_GPT2_PATTERN, kind="GPT2BPETokenizer")


def _huggingface(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """Build from a tokenizer.json, or a folder with one, whose tokenizer_config.json names the token that ends a document."""
    path, eod = data.tokenizer_model, None
    if path is not None and Path(path).is_dir():
        about, path = Path(path) / "tokenizer_config.json", str(Path(path) / "tokenizer.json")
        if about.is_file():
            with one_line(f"{about} has no valid eos_token: fix it, or use only tokenizer.json"):
                eod = json.loads(about.read_text(encoding="utf-8")).get("eos_token")
                eod = eod["content"] if isinstance(eod, dict) else eod
                if eod is not None and not isinstance(eod, str):
                    raise ValueError(f"{eod!r} is not a token's text")
    return HuggingFaceTokenizer(_file(path, "--tokenizer-model", "a tokenizer.json or a folder with one"), eod)


def _sentencepiece(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    path = _file(data.tokenizer_model, "--tokenizer-model", "a SentencePiece model (tokenizer.model)")
    return SentencePieceTokenizer(path, str(data.tokenizer_type), legacy=data.legacy_tokenizer)


def _tiktoken(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """Build Megatron-LM's TikTokenizer from a JSON list of `{"rank", "token_bytes", "token_str"}`; its ids begin after the special tokens.

    The list has at least `vocab_size - num_special_tokens` tokens; further ones are ignored. Special tokens without a name are
    `<SPECIAL_i>`. `</s>` ends a document.
    """
    path = _file(data.tokenizer_model, "--tokenizer-model", "a JSON list of tokens")
    size = _TIKTOKEN_VOCABULARY if vocab_size is None else vocab_size
    count = _TIKTOKEN_SPECIAL if data.tiktoken_num_special_tokens is None else data.tiktoken_num_special_tokens
    named = list(data.tokenizer_special_tokens or _TIKTOKEN_NAMES)
    if len(set(named)) < len(named) or not set(_TIKTOKEN_NAMES[:3]) <= set(named):
        raise ValueError(f"--tokenizer-special-tokens {' '.join(named)}: list each once, with {', '.join(_TIKTOKEN_NAMES[:3])} among them")
    if not len(named) <= count <= size - 256:
        raise ValueError(
            f"--tiktoken-num-special-tokens {count} must be between the {len(named)} listed and --vocab-size {size} minus 256 bytes"
        )
    with one_line(f'--tokenizer-model {path} is not a list of {{"rank", "token_bytes", "token_str"}} as TikTokenizer reads it'):
        entries = json.loads(path.read_text(encoding="utf-8"))
        tokens = _ranked([(entry["rank"], entry["token_bytes"]) for entry in entries])
        if tokens[:256] != [bytes([byte]) for byte in range(256)]:
            raise ValueError("its first 256 tokens are not the single bytes")
        if len(tokens) < size - count:
            raise ValueError(
                f"{len(tokens)} tokens are too few for {size} ids with {count} special: use --vocab-size {len(tokens) + count}"
            )
    names = {token: i for i, token in enumerate(named + [f"<SPECIAL_{i}>" for i in range(len(named), count)])}
    pattern = _TIKTOKEN_PATTERNS[data.tiktoken_pattern or "v2"]
    ranks = {token: i + count for i, token in enumerate(tokens[: size - count])}
    return BytePairTokenizer(ranks, names, eod="</s>", pattern=pattern, kind="TikTokenizer")


def _llama3(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """Build Llama 3's tokenizer from its `tokenizer.model`, a line per merged token with its bytes in base 64 and its id, or from a
    tokenizer.json. 256 special tokens follow; `<|end_of_text|>` ends a document."""
    if data.tokenizer_model is not None and (Path(data.tokenizer_model).is_dir() or data.tokenizer_model.endswith(".json")):
        return _huggingface(data, vocab_size)
    path = _file(data.tokenizer_model, "--tokenizer-model", "Llama 3's tokenizer.model")
    named = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4)), "start_header_id", "end_header_id"]
    named += ["reserved_special_token_4", "eot_id"]
    named += [f"reserved_special_token_{i}" for i in range(5, _LLAMA3_SPECIAL - len(named) + 5)]
    with one_line(f"--tokenizer-model {path} is not Llama 3's tokenizer.model, a token in base 64 and its id per line"):
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        tokens = _ranked([(int(rank), token) for token, rank in lines])
    special = {f"<|{name}|>": len(tokens) + i for i, name in enumerate(named)}
    return BytePairTokenizer(
        {token: i for i, token in enumerate(tokens)}, special, eod="<|end_of_text|>", pattern=_LLAMA3_PATTERN, kind="Llama3Tokenizer"
    )


def _ranked(entries: list[tuple[Any, Any]]) -> list[bytes]:
    """Return the tokens, given as rank and base 64; ValueError unless ranks count from 0 and tokens are unique."""
    tokens = [base64.b64decode(token, validate=True) for _, token in entries]
    if [rank for rank, _ in entries] != list(range(len(entries))) or len(set(tokens)) < len(tokens):
        raise ValueError("its ranks do not count 0, 1, 2, ..., or a token occurs twice")
    return tokens


def _null(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None:
        raise ValueError("NullTokenizer has no vocabulary: set --vocab-size N (ids 0..N-1, where N-1 ends a document)")
    return NullTokenizer(vocab_size)


_BUILDERS: dict[str, Callable[[DataConfig, int | None], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "HuggingFaceTokenizer": _huggingface,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "Llama3Tokenizer": _llama3,
    "TikTokenizer": _tiktoken,
    "NullTokenizer": _null,
}
