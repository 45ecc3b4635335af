"""Judge a `tokenizer.json` before the `tokenizers` library runs it: how much longer can it make a text?

A normalizer is a list of replacements, and each may multiply the text: 20 times "a" -> "aa" is a million bytes from one. The library has no
limit, and a process whose memory runs out in Rust is aborted. So the growth of each step is bounded from the file: bytes after it per byte
before it, in the worst text. Real files replace a space by "\u2581" (a growth of 3) or normalize Unicode (at most 11). ALBERT's bound is
1100, in a text that nobody writes. If the bound is larger than `UNCHECKED`, `check_text` measures texts before they are tokenized.

A regular expression takes memory and time when it is compiled: 24 KB for a class of characters, and with calls of groups a time that
doubles with every group. So their length is bounded, and calls are refused (`check_expressions`). In a text, the library gives up a match
after ten million steps, about half a second.

This module imports neither torch nor the library.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.lm.shell.opening import read_text

LIMITS = {"normalizer": 4096.0, "pre_tokenizer": 64.0, "decoder": 64.0}  # the largest bound that is accepted
UNCHECKED = 16.0  # texts are not measured if the bound is at most this
MEASURED = 64.0  # the largest growth of a piece of text that is accepted
EXPRESSIONS = 8192  # the most characters of all regular expressions of a file; GPT-4o's has 700, and a class compiles to 24 KB
# Calls of groups and recursion, conditions and callouts: none is in a published tokenizer. `x` would hide them behind comments.
_CALLS = re.compile(r"\\[gk]|\(\?(?:[R&({~\d+#]|-\d|P>|[a-wyz-]*x)|\(\*\w+[^)]*\)")
_ESCAPED = re.compile(r"\\[^gk]")
_PIECE = 256  # characters that are measured at once, so that the measurement itself needs little memory
_ADDED_BYTES = 2**26  # the most bytes of added tokens after the library has normalized them, which it does when it loads the file
# In bytes, over all characters of Unicode: U+1D1C0 in NFC and NFD, U+FDFA in NFKC and NFKD, U+023E in lower case, U+D7A3 without accents. A
# space may come before each piece, which has at least one byte, and a byte above 127 becomes two in GPT-2's alphabet.
_FACTORS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "BertNormalizer": 6, "ByteLevel": 4, "Metaspace": 8}


def read_tokenizer_json(path: Path) -> tuple[str, float]:
    """Return the content of a `tokenizer.json`, and the bound of its normalizer's growth.

    Raises:
        ValueError: if it is not a regular file with a JSON object, or a bound is larger than `LIMITS`.
    """
    text = read_text(path)
    content = json.loads(text, object_pairs_hook=_once)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not an object")
    return text, check_growth(content)


def check_growth(content: Mapping[str, Any]) -> float:
    """Return the bound of the normalizer in the content of a `tokenizer.json`; raise a ValueError if a bound is larger than `LIMITS`, or
    `check_expressions` refuses it."""
    check_expressions(content)
    bounds = {part: growth(content.get(part)) for part in LIMITS}
    for part, bound in bounds.items():
        if bound > LIMITS[part]:
            raise ValueError(
                f"its {part} can make a text {bound:g} times as long, and at most {LIMITS[part]:g} is accepted: use another tokenizer"
            )
    added = content.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    size = bounds["normalizer"] * sum(
        len(str(token.get("content")).encode("utf-8", "replace")) for token in tokens if token.get("normalized")
    )
    if size > _ADDED_BYTES:
        raise ValueError(f"its added tokens can become {size:g} bytes in its normalizer, and at most {_ADDED_BYTES} are accepted")
    return bounds["normalizer"]


def check_expressions(content: Mapping[str, Any]) -> None:
    """Raise a ValueError if the regular expressions in the content of a `tokenizer.json` have more than `EXPRESSIONS` characters, or one
    has a construct whose time to compile is not bounded by its length."""
    patterns = [pattern for part in LIMITS for pattern in _expressions(content.get(part))]
    if (length := sum(map(len, patterns))) > EXPRESSIONS:
        raise ValueError(f"its regular expressions have {length} characters, and at most {EXPRESSIONS} are accepted: use another tokenizer")
    for pattern in patterns:
        if call := _CALLS.search(_ESCAPED.sub("", pattern)):
            raise ValueError(
                f"its regular expression {pattern[:40]!r} has {call[0]!r}: calls of groups, conditions, callouts and the option x are not "
                "accepted, since their time has no bound; use another tokenizer"
            )


def _expressions(step: Any) -> Iterator[str]:
    """Yield the regular expressions in a part of a `tokenizer.json`."""
    if isinstance(step, list):
        for inner in step:
            yield from _expressions(inner)
    elif isinstance(step, Mapping):
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]
        for inner in step.values():
            yield from _expressions(inner)


def growth(step: Any) -> float:
    """Return an upper bound of bytes after a normalizer, pre-tokenizer or decoder, per byte of a text before it."""
    if isinstance(step, list):
        bound = 1.0
        for inner in step:
            bound *= growth(inner)
        return bound
    if not isinstance(step, dict):
        return 1.0
    bound = float(_FACTORS.get(str(step.get("type")), 1))
    if "content" in step:  # Replace
        bound *= _replaced(step.get("pattern"), _length(step["content"]))
    for name in ("prepend", "prefix", "suffix", "replacement"):  # before each piece of a text, which has at least one byte
        bound *= 1 + _length(step.get(name))
    if "precompiled_charsmap" in step:
        bound *= _longest(step["precompiled_charsmap"])
    for inner in step.values():
        if isinstance(inner, list):
            bound *= growth(inner)
    return bound


def check_text(text: str, normalize: Callable[[str], str]) -> None:
    """Raise a ValueError if a piece of a text becomes more than `MEASURED` times as long."""
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        before, after = len(piece.encode()), len(normalize(piece).encode())
        if after > MEASURED * before:
            raise ValueError(
                f"its normalizer makes {after} bytes of the {before} of {piece[:20]!r}...: use another tokenizer, or clean the text"
            )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("it has an entry twice")
    return unique


def _length(value: Any) -> int:
    return len(value.encode("utf-8", "replace")) if isinstance(value, str) else 0


def _replaced(pattern: Any, length: int) -> float:
    """Return the growth of a replacement by `length` bytes. A regular expression, or an empty text, may match between any two characters
    too."""
    of = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(of, str) and of:
        return max(1.0, length / _length(of))
    return 1.0 + 2 * length


def _longest(charsmap: Any) -> float:
    """Return the bytes of the longest text in SentencePiece's character map: the size of a trie, the trie, and texts that end in NUL."""
    try:
        data = base64.b64decode(charsmap)
        (size,) = struct.unpack_from("<I", data)
        return float(max([1, *map(len, data[4 + size :].split(b"\0"))]))
    except (binascii.Error, struct.error, TypeError, ValueError):
        return 1.0  # the library refuses it
