"""Read rows of data from JSON lines, parquet, and folders that Hugging Face's `datasets` saved or downloaded.

Parquet needs pyarrow (`pip install -e '.[data]'`), and a `save_to_disk` folder needs datasets; the error names a missing one.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ".jsonl, .json (one object per line), .parquet, or a folder of Hugging Face's datasets"
_SAVED = "state.json"  # written by Dataset.save_to_disk


def is_table(path: Path) -> bool:
    """Return whether `path` is a table and not JSON lines: parquet, or a folder of datasets."""
    return path.suffix == ".parquet" or path.is_dir()


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder.

    Raises:
        ValueError: missing, empty, of another kind, or a folder with neither a saved dataset nor parquet files.
    """
    if path.is_dir():
        if not (path / _SAVED).is_file() and not _parquet(path):
            raise ValueError(f"{path} has neither {_SAVED} (Dataset.save_to_disk) nor .parquet files: use {KINDS}")
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not path.is_file():
        raise ValueError(f"{path} does not exist: use {KINDS}")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"{path}: kind {path.suffix!r} is unknown: use {KINDS}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: there is nothing to read")
    return path.stat().st_size


def identity(path: Path) -> list[Any]:
    """Return what identifies an input: path, bytes, names and times; JSON-serializable."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    stamp = hashlib.sha256(repr(stats).encode()).hexdigest()
    return [str(path.absolute()), sum(size for _, size, _ in stats), stamp]


def read(path: Path, columns: list[str] | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row and its bytes of input (for a table: of its JSON).

    Args:
        columns: the columns of a table to read; None: all.

    Raises:
        ValueError: a line that is not a JSON object, a table without a column, a damaged file, or a missing library.
    """
    if not is_table(path):
        yield from ((row, size) for _, row, size in lines(path))
        return
    size(path)  # rejects a folder without a table
    for row in _saved(path, columns) if (path / _SAVED).is_file() else _tables(path, columns):
        yield row, len(json.dumps(row, ensure_ascii=False, default=str).encode())


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yield (line number, object, bytes of the line) of a file of JSON lines; ValueError with the number of an invalid line."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))  # skips a byte order mark
            except UnicodeDecodeError as error:
                place = f"{error.reason} at byte {error.start}"
                raise ValueError(f"{path}, line {number} is not UTF-8 text ({place}): convert the file first") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); every line must be one JSON object") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, not a {type(row).__name__}")
            yield number, row, len(line)


def _parquet(path: Path) -> list[Path]:
    return sorted(path.rglob("*.parquet")) if path.is_dir() else [path]


def _tables(path: Path, columns: list[str] | None) -> Iterator[dict[str, Any]]:
    parquet, arrow = _needed("pyarrow.parquet", path), _needed("pyarrow", path)
    for file in _parquet(path):
        try:
            with parquet.ParquetFile(file) as table:
                _check(file, table.schema_arrow.names, columns)
                for batch in table.iter_batches(batch_size=1024, columns=columns):
                    yield from batch.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read as parquet ({str(error).partition(chr(10))[0]})") from None


def _saved(path: Path, columns: list[str] | None) -> Iterator[dict[str, Any]]:
    datasets = _needed("datasets", path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (FileNotFoundError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read by datasets ({str(error).partition(chr(10))[0]})") from None
    _check(path, dataset.column_names, columns)
    yield from dataset.select_columns(columns) if columns is not None else dataset


def _check(path: Path, there: list[str], columns: list[str] | None) -> None:
    lacking = [column for column in columns or [] if column not in there]
    if lacking:
        raise ValueError(f"{path} has no column {', '.join(map(repr, lacking))}; it has {', '.join(map(repr, there))}: see --json-keys")


def _needed(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "eval" if name == "datasets" else "data"
        raise ValueError(f"{path} needs {name} ({error}): pip install -e '.[{extra}]', or use .jsonl") from None
