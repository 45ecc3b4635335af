"""Tokenize a large corpus part by part, so that a run that was killed can resume.

Each part is a separate dataset in `PREFIX.parts/`, either complete or absent; at the end they are joined. The result is identical, byte for
byte, to a dataset written at once, for any number of workers, kills and parts.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.lm.data.preprocessing.indexing import DatasetCounts, EncodeOptions, Writer, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.shell.files import own_folder, written_aside
from megatron.lm.shell.progress import Progress

PART_BYTES = 1 << 28  # input bytes per part: half a minute for one process
_PLAN = "plan.json"


def write_in_parts(
    documents: Iterable[Document],
    prefixes: Mapping[str, Path],
    options: EncodeOptions,
    *,
    source: Mapping[str, Any],
    workers: int = 1,
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, DatasetCounts]:
    """Run `write_datasets` part by part; finished parts of an earlier run of the same command are reused.

    Args:
        source: identifies this input: names, sizes, times; JSON-serializable.
        part_bytes: bytes of input per part.

    Raises:
        ValueError: as `write_datasets`, with all parts deleted unless the disk was full or a worker was killed; or there are parts from
            other input, another tokenizer or other settings.
    """
    folder = next(iter(prefixes.values())).with_name(next(iter(prefixes.values())).name + ".parts")
    plan = {"source": dict(source), "options": _identity(options), "keys": sorted(prefixes), "part_bytes": part_bytes}
    _begin(folder, json.dumps(plan, indent=2, default=str) + "\n")
    try:
        written = []
        for number, part in enumerate(_cut(iter(documents), part_bytes)):
            names = {key: folder / f"{number:05d}_{key}" for key in prefixes}
            mark = folder / f"{number:05d}.json"
            if mark.is_file():
                size = sum(document.source_bytes for document in part)
                if progress is not None and progress.total:
                    progress.total -= size
                say(f"part {number} is already finished")
            else:
                counts = write_datasets(part, names, options, workers=workers, progress=progress, part=True)
                with written_aside(mark) as stream:
                    stream.write(json.dumps({key: asdict(count) for key, count in counts.items()}).encode())
            written.append((names, json.loads(mark.read_text(encoding="utf-8"))))
        joined = _join(written, prefixes, options)
    except ValueError as error:
        if not isinstance(error.__context__, OSError | RuntimeError):  # a full disk or a killed worker: resume later
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return joined


def _identity(options: EncodeOptions) -> dict[str, Any]:
    """Return the settings, with the tokenizer's files by their content."""
    identity = asdict(options)
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        path = Path(getattr(options.data, name) or "")
        files = [path / "tokenizer.json", path / "tokenizer_config.json"] if path.is_dir() else [path]
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
        if digests:
            identity[name] = " ".join(digests)
    return identity


def _begin(folder: Path, plan: str) -> None:
    file = folder / _PLAN
    try:
        if file.is_file():
            if file.read_text(encoding="utf-8") != plan:
                raise ValueError(
                    f"{folder} is left over from a run on other input or with other settings: delete it, or choose another prefix"
                )
            return
        own_folder(folder)
        with written_aside(file) as stream:
            stream.write(plan.encode())
    except OSError as error:
        raise ValueError(f"--output-prefix {folder} cannot be written ({error}): choose a writable folder") from None


def _cut(documents: Iterator[Document], part_bytes: int) -> Iterator[Iterator[Document]]:
    """Yield parts of at least `part_bytes` of input; each must be read to its end before the next one."""
    for first in documents:
        left = part_bytes

        def part(first: Document = first) -> Iterator[Document]:
            nonlocal left
            for document in itertools.chain([first], documents):
                left -= document.source_bytes
                yield document
                if left <= 0:
                    return

        yield part()


def _join(
    written: list[tuple[dict[str, Path], dict[str, Any]]], prefixes: Mapping[str, Path], options: EncodeOptions
) -> dict[str, DatasetCounts]:
    from megatron.core.datasets.indexed_dataset import DType

    tokenizer = build_tokenizer(options.data, options.vocab_size)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    try:
        with ExitStack() as stack:
            writers = {key: stack.enter_context(Writer(prefix, tokenizer, dtype)) for key, prefix in prefixes.items()}
            for names, counts in written:
                for key, name in names.items():
                    if counts[key]["tokens"]:
                        writers[key].join(name, DatasetCounts(**counts[key]))
            for key, writer in writers.items():
                if writer.tokens == 0:
                    raise ValueError(f"the input has no text under key {key!r}: nothing was written")
            return {key: writer.publish() for key, writer in writers.items()}
    except OSError as error:
        raise ValueError(
            f"{', '.join(map(str, prefixes.values()))} cannot be written ({error}): free disk space and rerun; the parts are kept"
        ) from None
