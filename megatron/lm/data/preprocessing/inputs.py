"""Read documents from JSON lines and plain text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT

DOCUMENT_SEPARATORS = ("endoftext", "blank-lines")
_KINDS = ".jsonl, .json (one object per line) and .txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One document: its text by JSON key, and the number of bytes it occupies in the input file."""

    texts: Mapping[str, str]
    source_bytes: int


def check_input(path: Path) -> Path:
    """Return an input file; ValueError if it is missing, empty or of another kind."""
    if not path.is_file():
        raise ValueError(f"--input {path} does not exist, or is not a regular file: give {_KINDS}")
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise ValueError(
            f"--input {path}: kind {path.suffix!r} is unknown, accepted are {_KINDS}; `to_json` of a Hugging Face dataset writes .jsonl"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"--input {path} is empty: there is nothing to tokenize")
    return path


def read_documents(path: Path, keys: list[str], separator: str = "endoftext") -> Iterator[Document]:
    """Read the documents of a `.jsonl` (or `.json`) file with one object per line, or of a `.txt` file.

    Args:
        path: the input; its suffix determines the format.
        keys: JSON keys to read; a `.txt` file provides its text under each of them.
        separator: between the documents of a `.txt`: lines with only `<|endoftext|>`, or blank lines.

    Raises:
        ValueError: an input that `check_input` refuses, an unreadable file, or not UTF-8; a row without a key, or with another value than
            text.
    """
    check_input(path)
    try:
        if path.suffix == ".txt":
            yield from _plain_text(path, keys, separator)
            return
        for where, row, size in _lines(path):
            for key in keys:
                if key not in row:
                    raise ValueError(f"{where}: no key {key!r}; it has {', '.join(map(repr, row))}: see --json-keys")
                if not isinstance(row[key], str):
                    raise ValueError(f"{where}: {key!r} must hold text, not {type(row[key]).__name__}")
                if any("\ud800" <= letter <= "\udfff" for letter in row[key]):
                    raise ValueError(f"{where}: {key!r} contains half of a surrogate pair, which is not text: clean the line")
            yield Document(texts={key: row[key] for key in keys}, source_bytes=size)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start} of a line): convert it first") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield (place, object, bytes of the line) of a file of JSON lines."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where, text = f"{path}, line {number}", line.decode("utf-8-sig" if number == 1 else "utf-8")  # skips a byte order mark
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error}); every line must be one JSON object") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, not a {type(row).__name__}")
            yield where, row, len(line)


def _plain_text(path: Path, keys: list[str], separator: str) -> Iterator[Document]:
    if separator not in DOCUMENT_SEPARATORS:
        raise ValueError(f"--split-documents {separator} is unknown: choose one of {', '.join(DOCUMENT_SEPARATORS)}")
    marker = END_OF_TEXT if separator == "endoftext" else ""
    lines: list[str] = []
    size = 0

    def joined() -> Document:
        return Document(texts=dict.fromkeys(keys, "".join(lines).strip("\n")), source_bytes=size)

    with path.open(encoding="utf-8-sig") as stream:  # skips a byte order mark
        for line in stream:
            size += len(line.encode())
            if line.strip() != marker:
                lines.append(line)
            elif lines:
                yield joined()
                lines, size = [], 0
    if lines:
        yield joined()
