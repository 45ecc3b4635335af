"""Train, valid and test datasets of megatron-core from `--data-path`, checked before anything is built.

On bad data, megatron-core fails with an assertion, reads past the end of a map, or loops forever: the checks here report the problem.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType
from torch.utils.data import Dataset

from megatron.lm.config import DataConfig
from megatron.lm.config.blend_file import SPLITS, Blend, parse_blend, parse_split
from megatron.lm.data.preprocessing.indexing import read_counts
from megatron.lm.data.reading.order import Builder, EpochDataset, MockDataset
from megatron.lm.data.tokenizers.tokenizer import Tokenizer
from megatron.lm.processes.agreement import all_or_none
from megatron.lm.shell.files import own_folder

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_HOW_TO_MAKE = "create one with msamp preprocess, and pass its prefix without .bin or .idx"


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """Content of one dataset's index. lengths: [documents] int32, tokens of each document; fingerprint: hash of the index."""

    prefix: str
    lengths: np.ndarray
    dtype: np.dtype
    fingerprint: str


def build_datasets(
    data: DataConfig, tokenizer: Tokenizer, sample_counts: tuple[int, int, int], *, seq_length: int, seed: int
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Build the train, valid and test datasets with megatron-core's BlendedMegatronDatasetBuilder and GPTDataset, in the order of `order`.

    Collective: every rank calls it with the same arguments; without a process group, the world size is 1. Rank 0 writes the index
    caches (`--data-cache-path`, otherwise `index_cache` next to the first dataset), and the other ranks read them. A cache is keyed by the
    content of the indices, so a dataset that was rebuilt under the same name gets new caches; a damaged cache is rebuilt (`cache`).

    Args:
        data: the flags of the run's data.
        tokenizer: provides the end-of-document id and the legal range of ids.
        sample_counts: samples of seq_length tokens needed from each split; data that is too short repeats, and each epoch is shuffled
            independently. 0: no dataset.
        seq_length: tokens of a sample.
        seed: of the order.

    Returns:
        One dataset per split, with at least that many samples: `dataset[i]` contains tokens, labels, position_ids [s] int64 and loss_mask
        [s] float32. None if the split has no samples, or none are needed.

    Raises:
        ValueError: on all ranks: data that is missing, empty, truncated, malformed or shorter than one sequence; bad counts next to it;
            contradictory or malformed `--data-path` or `--split`. A sample with ids outside the vocabulary raises one when it is read.
    """
    if data.mock_data:
        with _process_group():
            mock_config = _gpt_config(data, tokenizer, [None] * len(SPLITS), list(sample_counts), None, seq_length, seed)
            train, valid, test = Builder(MockDataset, list(sample_counts), lambda: True, mock_config).build()
            return train, valid, test
    blends = split_blends(data)
    shares = parse_split(data.split) if data.data_path else [1.0 if blend else 0.0 for blend in blends]
    wanted = [count if share > 0 else 0 for count, share in zip(sample_counts, shares, strict=True)]
    if sample_counts[0] > 0 and wanted[0] == 0:
        raise ValueError(f"no training data: give the training split a share in --split {data.split}, or set --train-data-path")
    with _process_group():
        files = all_or_none(lambda: _open_all(blends, wanted, shares, data, seq_length))
        beside_data = Path(next(iter(files))).parent / "index_cache" if files else Path()
        digest = hashlib.sha256("".join(file.fingerprint for file in files.values()).encode()).hexdigest()
        cache = (Path(data.data_cache_path) if data.data_cache_path else beside_data) / digest[:16]
        all_or_none(lambda: _make_cache_folder(data, cache, files))
        weighted = [_weighted(blend, files, i, shares, data) for i, blend in enumerate(blends)]
        dataset_config = _gpt_config(data, tokenizer, weighted, wanted, cache, seq_length, seed)
        built = Builder(EpochDataset, list(wanted), lambda: True, dataset_config).build()
    train, valid, test = built
    return train, valid, test


def split_blends(data: DataConfig) -> list[Blend | None]:
    """Return the blend of each split, from `--data-path` (one for all) or `--{train,valid,test}-data-path`; none for mock data. ValueError
    if there is no data, or both."""
    per_split = [data.train_data_path, data.valid_data_path, data.test_data_path]
    if data.mock_data:
        return [None] * len(SPLITS)
    if data.data_path:
        if any(per_split):
            raise ValueError("--data-path and --train/valid/test-data-path contradict each other: use one or the other")
        blend = parse_blend(data.data_path, "--data-path")
        return [blend, blend, blend]
    if not any(per_split):
        raise ValueError("no data: set --data-path, or --train-data-path with --valid-data-path and --test-data-path")
    return [parse_blend(path, f"--{name}-data-path") if path else None for name, path in zip(SPLITS, per_split, strict=True)]


def read_index(prefix: str) -> IndexedFile:
    """Read `prefix.idx` and check it against the size of `prefix.bin`, without reading tokens.

    Raises:
        ValueError: a missing or empty file, an invalid or truncated index, or data whose length does not match the index.
    """
    idx, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (data, idx):
        if not path.is_file():
            raise ValueError(f"dataset {prefix}: {path} does not exist; {_HOW_TO_MAKE}")
        if path.stat().st_size == 0:
            raise ValueError(f"dataset {prefix}: {path} is empty; {_HOW_TO_MAKE}")
    try:
        raw = idx.read_bytes()
    except OSError as error:
        raise ValueError(f"dataset {prefix}: {idx} cannot be read ({error.strerror})") from None
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(f"dataset {prefix}: {idx} is not an index of megatron-core; {_HOW_TO_MAKE}")
    _, version, code, count, boundaries = _HEADER.unpack_from(raw)
    known = {item.value: np.dtype(item.name) for item in DType}
    if version != 1 or code not in known or known[code].kind not in "iu":
        raise ValueError(f"dataset {prefix}: {idx} has version {version} and dtype code {code}; expected version 1 with integer tokens")
    expected = _HEADER.size + count * (4 + 8) + boundaries * 8  # length (int32), pointer and boundaries (int64)
    if len(raw) != expected:
        raise ValueError(f"dataset {prefix}: {idx} has {len(raw)} bytes, but its header requires {expected}: damaged; {_HOW_TO_MAKE}")
    lengths = np.frombuffer(raw, np.int32, count, _HEADER.size)
    pointers = np.frombuffer(raw, np.int64, count, _HEADER.size + 4 * count)
    if count == 0 or lengths.min() < 0 or int(lengths.sum(dtype=np.int64)) == 0:
        raise ValueError(f"dataset {prefix}: {idx} lists no tokens; {_HOW_TO_MAKE}")
    if boundaries == 0 or np.frombuffer(raw, np.int64, boundaries, _HEADER.size + 12 * count)[-1] != count:
        raise ValueError(f"dataset {prefix}: {idx} has document boundaries that do not end at its {count} sequences: damaged")
    ends = pointers + lengths * np.int64(known[code].itemsize)
    if pointers.min() < 0 or ends.min() < 0:
        raise ValueError(f"dataset {prefix}: {idx} points outside {data}: damaged; {_HOW_TO_MAKE}")
    _check_size(prefix, data, int(ends.max()))
    return IndexedFile(prefix=prefix, lengths=lengths, dtype=known[code], fingerprint=hashlib.sha256(raw).hexdigest())


def _check_size(prefix: str, data: Path, expected: int) -> None:
    actual = data.stat().st_size
    if actual < expected:
        raise ValueError(
            f"dataset {prefix}: {data} is truncated: it has {actual} of the {expected} bytes that its index requires; {_HOW_TO_MAKE}"
        )
    if actual > expected:
        raise ValueError(
            f"dataset {prefix}: {data} has {actual} bytes, but its index covers only {expected}: .bin and .idx do not belong together"
        )


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Create a process group of size 1 if there is none: megatron-core's blends need a rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _open_all(
    blends: list[Blend | None], wanted: list[int], shares: list[float], data: DataConfig, seq_length: int
) -> dict[str, IndexedFile]:
    """Read every index that a needed split draws from, and check that the split's part of it fills a sequence."""
    files: dict[str, IndexedFile] = {}
    for i, (blend, count) in enumerate(zip(blends, wanted, strict=True)):
        if blend and count > 0 and len(blend.prefixes) == 1:
            read_counts(blend.prefixes[0])  # evaluations use them for bits per byte: reject bad ones before the first step
        for prefix in blend.prefixes if blend and count > 0 else []:
            files.setdefault(prefix, read_index(prefix))
            part = files[prefix].lengths
            if data.data_path:  # the documents that megatron-core assigns to the split, with its own rounding
                edges = [round(edge * len(part)) for edge in itertools.accumulate(shares, initial=0.0)]
                part = part[edges[i] : edges[i + 1]]
            tokens, needed = int(part.sum(dtype=np.int64)), seq_length + 1
            if not len(part):
                share = f"--split {data.split}" if data.data_path else f"--{SPLITS[i]}-data-path"
                raise ValueError(
                    f"the {SPLITS[i]} split of {prefix} has no document: {len(files[prefix].lengths)} documents are too few for its share "
                    f"of {share}; give it a larger share or none (such as --split 95,5,0), or set --eval-iters 0"
                )
            if tokens < needed:
                raise ValueError(
                    f"the {SPLITS[i]} split of {prefix} has {tokens} tokens in {len(part)} documents; --seq-length {seq_length} needs "
                    f"{needed}: use a shorter --seq-length, a larger share of --split, or more text"
                )
    return files


def _weighted(
    blend: Blend | None, files: dict[str, IndexedFile], split: int, shares: list[float], data: DataConfig
) -> tuple[list[str], list[float] | None] | None:
    """Return a blend in megatron-core's form. Several datasets always get weights: without weights, it stops after one epoch."""
    if blend is None:
        return None
    if len(blend.prefixes) == 1:
        return blend.prefixes, None
    if blend.weights is not None:
        return blend.prefixes, blend.weights
    if not all(prefix in files for prefix in blend.prefixes):
        return blend.prefixes, None
    return blend.prefixes, [float(files[prefix].lengths.sum(dtype=np.int64)) for prefix in blend.prefixes]


def _make_cache_folder(config: DataConfig, cache: Path, files: dict[str, IndexedFile]) -> None:
    """Create the cache folder on rank 0."""
    if dist.get_rank() != 0 or not files:
        return
    try:
        if not config.data_cache_path:  # a folder next to the data, which may be shared
            own_folder(cache.parent)
        own_folder(cache)
    except (OSError, ValueError) as error:
        raise ValueError(f"index caches cannot be written to {cache} ({error}): set --data-cache-path to a writable folder") from None


def _gpt_config(
    data: DataConfig,
    tokenizer: Tokenizer,
    blends: list[tuple[list[str], list[float] | None] | None],
    wanted: list[int],
    cache: Path | None,
    seq_length: int,
    seed: int,
) -> GPTDatasetConfig:
    shared = bool(data.data_path)
    used = [blend if count > 0 else None for blend, count in zip(blends, wanted, strict=True)]
    result = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blends[0] if shared else None,
        blend_per_split=None if shared else used,
        split=data.split if shared else None,
        path_to_cache=str(cache) if cache else None,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,  # see `documents`: no mask is built on the host
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
    )
    if result.split_matrix is not None:
        # Build a split only on demand: with few documents it may be empty, and megatron-core would search for its tokens forever.
        result.split_matrix = [edges if count > 0 else None for edges, count in zip(result.split_matrix, wanted, strict=True)]
    return result
