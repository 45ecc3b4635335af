"""Convert documents to megatron-core's indexed datasets: tokenize them in worker processes, write `.bin`, `.idx` and `.json`.

The `.json` next to a dataset contains its counts, which convert a loss in nats per token to bits per byte:
bits_per_byte = loss / ln 2 * tokens / text_bytes.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import fcntl
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron.lm.shell.files import flush, read_text, to_write
from megatron.lm.shell.progress import Progress

_PARTIALS = (".bin.partial", ".idx.partial", ".json.partial")
_CHUNK_BYTES = 1 << 18  # text sent to a worker at once: large enough to hide the transfer, small enough for a live progress line


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetCounts:
    """Content of `<prefix>.json`. tokens include the end-of-document ids; text_bytes are the UTF-8 bytes of the text only."""

    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How text becomes ids: the tokenizer's configuration, and whether an eod ends every document."""

    data: DataConfig
    vocab_size: int | None = None
    append_eod: bool = True


def write_datasets(
    documents: Iterable[Document],
    prefixes: Mapping[str, Path],
    options: EncodeOptions,
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, DatasetCounts]:
    """Tokenize `documents` and write one indexed dataset per key: `prefixes[key]` plus `.bin`, `.idx` and `.json`.

    Files have temporary names until the end, and `.idx` is renamed last: a kill at any time leaves the old dataset, the new one, or none
    that a trainer would open, but never a partial one. The next write of the dataset deletes the remains of a killed one and logs that to
    stderr. Token ids are uint16 if the vocabulary allows it, otherwise int32.

    Args:
        workers: number of worker processes; 0 tokenizes in this process.
        progress: counts bytes of input; the caller's block prints it.

    Returns:
        The counts of each dataset.

    Raises:
        ValueError: from the tokenizer or the reader; no text under a key in any document; a prefix that cannot be written, or that
            another process is writing to. Everything written by this call is then deleted.
    """
    from megatron.core.datasets.indexed_dataset import DType  # deferred: workers import this module but do not need it

    tokenizer = build_tokenizer(options.data, options.vocab_size)
    try:
        with contextlib.ExitStack() as stack:
            dtype = DType.optimal_dtype(tokenizer.vocab_size)
            writers = {key: stack.enter_context(_Writer(prefix, tokenizer, dtype)) for key, prefix in prefixes.items()}
            # Closed explicitly: an error below must stop the workers now, not when the traceback is garbage-collected.
            encoded_chunks = stack.enter_context(contextlib.closing(_encoded(_chunks(documents), options, workers)))
            for chunk in encoded_chunks:
                for key, encoded in chunk.items.items():
                    writers[key].add(encoded)
                if progress is not None:
                    progress.done += chunk.source_bytes
            for key, writer in writers.items():
                if writer.tokens == 0:
                    raise ValueError(f"the input has no text under key {key!r}: nothing was written")
            return {key: writer.publish() for key, writer in writers.items()}
    except OSError as error:
        where = ", ".join(str(prefix) for prefix in prefixes.values())
        raise ValueError(f"{where} cannot be written ({error}): free disk space, or choose another prefix") from None
    except concurrent.futures.process.BrokenProcessPool:
        raise ValueError(f"one of {workers} worker processes was killed, possibly out of memory: use fewer --workers") from None


def read_counts(prefix: str) -> DatasetCounts | None:
    """Return the counts in the `.json` next to a dataset; None if there is none. ValueError if `write_datasets` cannot have written it."""
    file = Path(f"{prefix}.json")
    if not file.exists():
        return None
    fix = "rebuild the dataset with msamp preprocess, or delete the file: evaluations then report no bits per byte"
    try:
        record = json.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset {prefix}: {file} cannot be read ({error}); {fix}") from None
    wanted = {field.name: field.type for field in dataclasses.fields(DatasetCounts)}
    if not isinstance(record, dict) or any(type(record.get(name)).__name__ != kind for name, kind in wanted.items()):
        raise ValueError(f"dataset {prefix}: {file} does not contain the counts {', '.join(wanted)}; {fix}")
    counts = DatasetCounts(**{name: record[name] for name in wanted})
    if counts.tokens < 1 or counts.text_bytes < 1:
        raise ValueError(f"dataset {prefix}: {file} counts {counts.tokens} tokens and {counts.text_bytes} bytes of text; {fix}")
    return counts


class _Writer:
    """Writer of one dataset under temporary names: `publish` renames the files; exiting without it deletes them.

    The context manager holds a lock on `.bin.partial`, which a kill releases: an unlocked file is left over from a kill.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer, dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefix, self._vocab_size, self._dtype = prefix, tokenizer.vocab_size, dtype
        self.documents = self.tokens = self.text_bytes = 0
        self._made = [folder for folder in (prefix.parent, *prefix.parent.parents) if not folder.exists()]
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            left = [path for path in map(self._name, _PARTIALS) if os.path.lexists(path)]
            self._held = to_write(self._name(".bin.partial"))  # does not change another process's file
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # spawned workers do not inherit it
            for path in left:
                if path != self._name(".bin.partial"):  # which the builder truncates
                    path.unlink()
                print(f"deleted {path}, left over from an interrupted run", file=sys.stderr, flush=True)
            self._builder = IndexedDatasetBuilder(str(self._name(".bin.partial")), dtype=dtype)
        except BlockingIOError:
            raise ValueError(
                f"--output-prefix {prefix} is being written by another process: wait for it to end, or choose another prefix"
            ) from None
        except (OSError, ValueError) as error:
            self._remove_empty()
            raise ValueError(f"--output-prefix {prefix} cannot be written ({error}): choose a writable folder") from None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was already reported where it occurred
            self._builder.data_file.close()
        for path in map(self._name, _PARTIALS):
            path.unlink(missing_ok=True)
        self._held.close()
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the folders that this made, unless a dataset is in them."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _name(self, suffix: str) -> Path:
        return self._prefix.with_name(self._prefix.name + suffix)

    def add(self, encoded: _Encoded) -> None:
        for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]):
            if len(ids):
                self._builder.add_document(ids, [len(ids)])
                self.documents += 1
        self.tokens += len(encoded.ids)
        self.text_bytes += encoded.text_bytes

    def publish(self) -> DatasetCounts:
        counts = DatasetCounts(
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            vocab_size=self._vocab_size,
            dtype=np.dtype(self._dtype).name,
        )
        self._builder.finalize(str(self._name(".idx.partial")))
        with to_write(self._name(".json.partial"), "wb") as stream:
            stream.write((json.dumps(dataclasses.asdict(counts), indent=2) + "\n").encode())
        for suffix in (".bin", ".json", ".idx"):
            flush(self._name(suffix + ".partial"))
        # The index is removed first and renamed last: without it, the other files are not opened.
        self._name(".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            os.replace(self._name(suffix + ".partial"), self._name(suffix))
        flush(self._prefix.parent)
        return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Encoded:
    """Concatenated documents of one chunk: ids [tokens] int32, lengths [documents], bytes of their text."""

    ids: np.ndarray
    lengths: list[int]
    text_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    items: dict[str, _Encoded]
    source_bytes: int


class _Encoder:
    """Tokenizer of chunks of documents; each worker has one."""

    def __init__(self, options: EncodeOptions) -> None:
        self._tokenizer = build_tokenizer(options.data, options.vocab_size)
        self._end = [self._tokenizer.eod] if options.append_eod else []

    def __call__(self, documents: list[Document]) -> _Chunk:
        items = {key: self._encode([document.texts[key] for document in documents]) for key in documents[0].texts}
        return _Chunk(items=items, source_bytes=sum(document.source_bytes for document in documents))

    def _encode(self, texts: list[str]) -> _Encoded:
        lists = [self._tokenizer.tokenize(text) for text in texts]
        # Skip a document without tokens: it would only add an end-of-document id.
        ended = [ids + self._end if ids else ids for ids in lists]
        return _Encoded(
            ids=np.fromiter(itertools.chain.from_iterable(ended), dtype=np.int32),
            lengths=[len(ids) for ids in ended],
            text_bytes=sum(len(text.encode()) for text, ids in zip(texts, lists, strict=True) if ids),
        )


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.source_bytes
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded(chunks: Iterator[list[Document]], options: EncodeOptions, workers: int) -> Generator[_Chunk]:
    """Yield encoded chunks in the order of the input, with a bounded number in flight."""
    if workers <= 0:
        yield from map(_Encoder(options), chunks)
        return
    # Spawned, not forked: a fork of a process with torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (options,)) as pool:
        waiting: deque[concurrent.futures.Future[_Chunk]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_WORKER: dict[str, _Encoder] = {}  # filled in each worker process, never in the parent


def _start_worker(options: EncodeOptions) -> None:
    _WORKER["encoder"] = _Encoder(options)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Exit with the parent process: a killed parent cannot notify its workers, and they would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _work(chunk: list[Document]) -> _Chunk:
    return _WORKER["encoder"](chunk)
