"""Byte-level BPE tokenizers with tiktoken: GPT-2's, Megatron-LM's TikTokenizer, and Llama 3's `tokenizer.model`.

Each file lists the merged tokens in merge order. The ids of special tokens come before the merged tokens (TikTokenizer) or after them
(Llama 3). The spelling of a special token inside a text is ordinary text.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, library

TIKTOKEN_VOCABULARY = 2**17  # Megatron-LM's default without --vocab-size
TIKTOKEN_SPECIAL = 1000
TIKTOKEN_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_NEEDED = ("<unk>", "<s>", "</s>")
LLAMA3_SPECIAL = 256  # reserved ids after the merged tokens; Llama 3 uses the first ones

# GPT-2's word splitter, as published with its vocabulary; possessive quantifiers would only change the speed.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TIKTOKEN_PATTERNS = {  # --tiktoken-pattern
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class BytePairTokenizer(Tokenizer):
    """A byte-level BPE with its special tokens.

    Args:
        ranks: bytes of each merged token -> its id; merges happen in the order of ids. Must contain all single bytes.
        special: special token -> its id.
        eod: the special token that ends a document.
        pattern: regular expression that splits a text into words; tokens merge only within a word.
        kind: the value of `--tokenizer-type`.
    """

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], *, eod: str, pattern: str, kind: str) -> None:
        tiktoken = library("tiktoken", kind)
        self.vocab_size, self.eod = len(ranks) + len(special), special[eod]
        self._special = frozenset(special.values())
        self._encoding = tiktoken.Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=self.vocab_size
        )

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        return self._encoding.decode(ids)

    def word_begins(self) -> np.ndarray:
        texts = (b" " if i in self._special else self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size))
        return np.array([text[:1].isspace() for text in texts])


class GPT2BPETokenizer(BytePairTokenizer):
    """Build GPT-2's byte-level BPE from its two files (`encoder.json`, `vocab.bpe`)."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        encoder = _read_encoder(vocab_file)
        if END_OF_TEXT not in encoder:
            raise ValueError(f"--vocab-file {vocab_file} has no {END_OF_TEXT}: use the encoder.json that belongs to the merges")
        ranks = {_token_bytes(token, vocab_file): rank for token, rank in encoder.items() if token != END_OF_TEXT}
        _check_merges(encoder, merge_file)
        if sorted(encoder.values()) != list(range(len(encoder))):
            raise ValueError(f"--vocab-file {vocab_file}: ids must be 0..{len(encoder) - 1}, each once; the file is damaged")
        lacking = sum(bytes([byte]) not in ranks for byte in range(256))
        if lacking:
            raise ValueError(
                f"--vocab-file {vocab_file} lacks {lacking} of the 256 bytes, and cannot encode every text: use a complete one"
            )
        special = {END_OF_TEXT: encoder[END_OF_TEXT]}
        super().__init__(ranks, special, eod=END_OF_TEXT, pattern=_GPT2_PATTERN, kind="GPT2BPETokenizer")


class TikTokenizer(BytePairTokenizer):
    """Build Megatron-LM's TikTokenizer from a JSON list of `{"rank", "token_bytes", "token_str"}`; its ids begin after the special tokens.

    Args:
        path: the list, with at least `vocab_size - num_special_tokens` tokens; further tokens are ignored.
        vocab_size: all ids; None: 131072.
        pattern: `v1` or `v2`; None: `v2`.
        num_special_tokens: ids reserved for special tokens, from 0 on; None: 1000.
        special_tokens: their spellings; the rest are `<SPECIAL_i>`. Empty: `TIKTOKEN_TOKENS`. `</s>` ends a document.

    Raises:
        ValueError: an invalid or too short file; contradictory counts or special tokens.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int | None = None,
        pattern: str | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] = (),
    ) -> None:
        vocab_size = TIKTOKEN_VOCABULARY if vocab_size is None else vocab_size
        count = TIKTOKEN_SPECIAL if num_special_tokens is None else num_special_tokens
        named = list(special_tokens or TIKTOKEN_TOKENS)
        if len(set(named)) < len(named) or not set(_NEEDED) <= set(named):
            raise ValueError(f"--tokenizer-special-tokens {' '.join(named)}: list each once, with {', '.join(_NEEDED)} among them")
        if not len(named) <= count <= vocab_size - 256:
            raise ValueError(
                f"--tiktoken-num-special-tokens {count} must be between the {len(named)} that are listed and --vocab-size {vocab_size} "
                "minus 256 bytes"
            )
        named += [f"<SPECIAL_{i}>" for i in range(len(named), count)]
        special = {token: i for i, token in enumerate(named)}
        tokens = _read_list(path)
        if len(tokens) < vocab_size - count:
            raise ValueError(
                f"--tokenizer-model {path} lists {len(tokens)} tokens, and --vocab-size {vocab_size} with {count} special tokens needs "
                f"{vocab_size - count}: use --vocab-size {len(tokens) + count}"
            )
        ranks = {token: i + count for i, token in enumerate(tokens[: vocab_size - count])}
        super().__init__(ranks, special, eod="</s>", pattern=_TIKTOKEN_PATTERNS[pattern or "v2"], kind="TikTokenizer")
        self.mask = special.get("<mask>")


class Llama3Tokenizer(BytePairTokenizer):
    """Build Llama 3's tokenizer from its `tokenizer.model`: one line per merged token, with its bytes in base 64 and its id. 256 special
    tokens follow; `<|end_of_text|>` ends a document."""

    def __init__(self, path: Path) -> None:
        tokens = _read_ranks(path)
        first = ["<|begin_of_text|>", "<|end_of_text|>"]
        first += [f"<|reserved_special_token_{i}|>" for i in range(4)]
        first += ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
        named = first + [f"<|reserved_special_token_{i}|>" for i in range(5, LLAMA3_SPECIAL - len(first) + 5)]
        special = {token: len(tokens) + i for i, token in enumerate(named)}
        ranks = {token: i for i, token in enumerate(tokens)}
        super().__init__(ranks, special, eod="<|end_of_text|>", pattern=_LLAMA3_PATTERN, kind="Llama3Tokenizer")


def _read_list(path: Path) -> list[bytes]:
    """Read the tokens of a TikTokenizer's file, by rank."""
    wanted = '--tokenizer-model {} is not a list of {{"rank", "token_bytes", "token_str"}}, as TikTokenizer reads it{}'
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        tokens = _checked([(entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)) for entry in entries])
        if tokens[:256] != [bytes([byte]) for byte in range(256)]:
            raise ValueError("its first 256 tokens are not the single bytes")
        return tokens
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(wanted.format(path, f": {error}")) from None


def _read_ranks(path: Path) -> list[bytes]:
    """Read the tokens of Llama 3's file, by rank."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        return _checked([(int(rank), base64.b64decode(token, validate=True)) for token, rank in lines])
    except ValueError as error:
        raise ValueError(
            f"--tokenizer-model {path} is not Llama 3's tokenizer.model, a token in base 64 and its id per line: {error}"
        ) from None


def _checked(entries: list[tuple[Any, bytes]]) -> list[bytes]:
    """Return the tokens in rank order; ValueError unless ranks count from 0, tokens are unique and all single bytes are present."""
    tokens = [token for _, token in entries]
    if [rank for rank, _ in entries] != list(range(len(entries))):
        raise ValueError("its ranks do not count 0, 1, 2, ...")
    if len(set(tokens)) < len(tokens) or not {bytes([byte]) for byte in range(256)} <= set(tokens):
        raise ValueError("a token comes twice, or one of the 256 bytes is missing")
    return tokens


def _read_encoder(path: Path) -> dict[str, int]:
    wanted = "a JSON object of token to id, as GPT-2's encoder.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--vocab-file {path} is not {wanted}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(value, int) for value in content.values()):
        raise ValueError(f"--vocab-file {path} is not {wanted}")
    return cast("dict[str, int]", content)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable spelling of the 256 bytes: visible Latin-1 is unchanged, the rest maps to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def _token_bytes(token: str, vocab_file: Path) -> bytes:
    try:
        return bytes(_byte_alphabet()[character] for character in token)
    except KeyError as error:
        raise ValueError(f"--vocab-file {vocab_file}: token {token!r} contains {error}, which is not in GPT-2's byte alphabet") from None


def _check_merges(encoder: dict[str, int], merge_file: Path) -> None:
    """Check that the merge list is in the order of ids, in which tiktoken merges; otherwise ValueError."""
    lines = merge_file.read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#version")]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--merge-file {merge_file} is not a list of merges, two tokens per line, as GPT-2's vocab.bpe")
    ids = [encoder.get(first + second, -1) for first, second in pairs]
    if -1 in ids or any(a >= b for a, b in itertools.pairwise(ids)):
        raise ValueError(
            f"--merge-file {merge_file} does not belong to --vocab-file: its merges differ from the vocabulary's in the order of ids"
        )
