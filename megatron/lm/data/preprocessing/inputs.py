"""Read documents from JSON lines, plain text, parquet, and folders that Hugging Face's `datasets` saved or downloaded.

Parquet needs pyarrow (`pip install -e '.[data]'`), and a `save_to_disk` folder needs datasets; the error names a missing one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT

DOCUMENT_SEPARATORS = ("endoftext", "blank-lines")
_KINDS = ".jsonl, .json (one object per line), .txt, .parquet and folders of Hugging Face's datasets"
_SAVED = "state.json"  # written by Dataset.save_to_disk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One document: its text by JSON key, and the number of bytes it occupies in the input file (for a table: of its JSON)."""

    texts: Mapping[str, str]
    source_bytes: int


def files_of(path: Path) -> list[Path]:
    """Return the files of an input in order: the file itself, or all files in a folder that is a dataset.

    Raises:
        ValueError: missing, empty or of another kind; a folder without a dataset; a pipe, a device or a broken link in it.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if not file.is_dir())
        irregular = [file for file in files if not file.is_file()]
        if irregular:
            raise ValueError(f"--input {irregular[0]} is not a regular file: put the file itself there, or remove it")
        if not any(file == path / _SAVED or file.suffix == ".parquet" for file in files):
            raise ValueError(f"--input {path} has neither {_SAVED} (Dataset.save_to_disk) nor .parquet files")
        return files
    if not path.is_file():
        raise ValueError(f"--input {path} does not exist, or is not a regular file: give {_KINDS}")
    if path.suffix not in (".jsonl", ".json", ".txt", ".parquet"):
        raise ValueError(f"--input {path}: kind {path.suffix!r} is unknown, accepted are {_KINDS}")
    if path.stat().st_size == 0:
        raise ValueError(f"--input {path} is empty: there is nothing to tokenize")
    return [path]


def identity(path: Path) -> list[Any]:
    """Return what identifies an input: path, bytes, names and times; JSON-serializable."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(path)]
    return [str(path.absolute()), sum(size for _, size, _ in stats), hashlib.sha256(repr(stats).encode()).hexdigest()]


def read_documents(path: Path, keys: list[str], separator: str = "endoftext") -> Iterator[Document]:
    """Read the documents of a `.jsonl` (or `.json`) file with one object per line, of a `.txt` file, or of a table.

    Args:
        path: the input; its suffix determines the format, and a folder is a table.
        keys: JSON keys or columns to read; a `.txt` file provides its text under each of them.
        separator: between the documents of a `.txt`: lines with only `<|endoftext|>`, or blank lines.

    Raises:
        ValueError: an input that `files_of` refuses, an unreadable file, or not UTF-8; a row without a key, or with another value than
            text.
    """
    files = files_of(path)
    try:
        if path.suffix == ".txt" and not path.is_dir():
            yield from _plain_text(path, keys, separator)
            return
        for where, row, size in _lines(path) if path.suffix in (".jsonl", ".json") and not path.is_dir() else _table(path, files, keys):
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


def _table(path: Path, files: list[Path], columns: list[str]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield (place, row, bytes of its JSON) of parquet files, or of a dataset that `save_to_disk` wrote."""
    saved = path / _SAVED in files
    rows = _saved(path, columns) if saved else _parquet([file for file in files if file.suffix == ".parquet"], columns)
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row, len(json.dumps(row, ensure_ascii=False, default=str).encode())


def _parquet(files: list[Path], columns: list[str]) -> Iterator[dict[str, Any]]:
    parquet, arrow = _needed("pyarrow.parquet", files[0]), _needed("pyarrow", files[0])
    for file in files:
        try:
            with parquet.ParquetFile(file) as table:
                _check(file, table.schema_arrow.names, columns)
                for batch in table.iter_batches(batch_size=1024, columns=columns):
                    yield from batch.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read as parquet ({str(error).partition(chr(10))[0]})") from None


def _saved(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    datasets = _needed("datasets", path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read by datasets ({str(error).partition(chr(10))[0]})") from None
    _check(path, dataset.column_names, columns)
    yield from dataset.select_columns(columns)


def _check(path: Path, there: list[str], columns: list[str]) -> None:
    lacking = [column for column in columns if column not in there]
    if lacking:
        raise ValueError(f"{path} has no column {', '.join(map(repr, lacking))}; it has {', '.join(map(repr, there))}: see --json-keys")


def _needed(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "eval" if name == "datasets" else "data"
        raise ValueError(f"{path} needs {name} ({error}): pip install -e '.[{extra}]', or use .jsonl") from None
