"""The order in which a run reads its data: how it is drawn, what determines it, and how a resumed run detects a different order.

An epoch reads every document of the split once. Its documents are shuffled, concatenated and cut into sequences, and the sequences are
shuffled; a sequence across the end of an epoch belongs to the next one. Each epoch has its own generator, seeded with the seed and the
epoch's number. A long run therefore begins with the same epochs as a short one: a run that is extended with `--train-iters` continues
in the same order, also past the end of an epoch. megatron-core shuffles all epochs of a run together, so each number of epochs has a
different order; for a run of one epoch its order equals this one. A blend draws from each dataset by its weight, sample by sample, and
does not depend on the length of the run either.

The entry `data` of a checkpoint has everything that determines the order: the seed, and for each dataset its weight, the documents used
for training, digests of its index and of a part of its tokens, and when the tokens were last modified. The index has the length of every
document, so another size is another index. Paths and names do not matter, and neither does the time alone: a copy of the data is the same
data, but the log names it, since tokens outside of the part may have changed. A resume also compares the settings that decide what a sample
is, such as `--reset-attention-mask`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron.lm.config import DataConfig
from megatron.lm.config.cli import config_from_dict
from megatron.lm.config.sections.schema import flag
from megatron.lm.data.reading.cache import kept
from megatron.lm.data.tokenizers.tokenizer import Tokenizer

MOCK = "--mock-data"  # used in place of a prefix
ORDER = "epochs apart"  # every other way to draw it has another name
_PARTS, _PART_BYTES = 64, 4096  # number and size of the parts of a dataset's tokens that its digest covers
# Settings that decide what a sample is: which tokens see each other, their positions, and which of them count in the loss.
_OF_SAMPLES = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "mask_prob", "mask_whole_words")
_SURPLUS = 1.005  # megatron-core builds this multiple of the samples that a blend needs from a dataset


class EpochDataset(GPTDataset):
    """megatron-core's dataset, in an order that later epochs do not change. `cache` stores its indices."""

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, ...]:
        tokens, *others = super()._query_document_sample_shuffle_indices(idx)  # two arrays; from megatron-core 0.19 on three
        size = self.config.tokenizer.vocab_size
        if np.maximum.reduce(tokens) >= size or np.minimum.reduce(tokens) < 0:
            wrong = tokens[(tokens >= size) | (tokens < 0)][0]
            raise ValueError(
                f"dataset {self.dataset_path}: token id {wrong} is outside the tokenizer's [0, {size}): "
                "train with the tokenizer that the data was tokenized with, or rebuild the data with msamp preprocess"
            )
        return tokens, *others

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, ...]:
        arrays = ("document_index", "sample_index", "shuffle_index")
        return kept(Path(self.config.path_to_cache), _cache_name(self, self.index_split), arrays, self._order, writes=dist.get_rank() == 0)

    def _order(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return documents [epochs x documents]; each sample's start as position in them and token [samples + 1, 2]; samples [samples]."""
        length, tokens = self.config.sequence_length, self._get_num_tokens_per_epoch()
        # A blend's greedy choice takes up to one sample more than its share from a dataset, and its length is rounded up once for each
        # dataset.
        blend = self.config.blend if self.config.blend_per_split is None else self.config.blend_per_split[self.index_split.value]
        wanted = self.num_samples + (len(blend[0]) + 1 if blend is not None and len(blend[0]) > 1 else 0)
        epochs = -(-(wanted * length + 1) // tokens)
        ends = [0, *((epoch * tokens - 1) // length for epoch in range(1, epochs + 1))]
        documents, samples = [], []
        for epoch, (begin, end) in enumerate(itertools.pairwise(ends)):
            draw = np.random.RandomState([self.config.random_seed, epoch] if epoch else self.config.random_seed)
            documents.append(draw.permutation(self.indices).astype(np.int32))
            samples.append(draw.permutation(np.arange(begin, end, dtype=np.int64)))
        joined = np.concatenate(documents)
        begins = helpers.build_sample_idx(self.dataset.sequence_lengths.copy(), joined, length, epochs, tokens, True, True)
        shuffled = np.concatenate(samples)
        return joined, begins, shuffled.astype(np.uint32) if len(shuffled) < np.iinfo(np.uint32).max else shuffled


class MockDataset(EpochDataset, MockGPTDataset):
    """megatron-core's mock documents in the order of `EpochDataset`: 100,000 documents of 1 to 4095 tokens, each 1, 2, 3, ... modulo the
    vocabulary size up to the end-of-document token. Their lengths are drawn from a fixed seed; no file is read or written."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, ...]:
        return self._order()


class EpochBlend(BlendedDataset):
    """megatron-core's blend of datasets. `cache` stores its indices."""

    def _build_indices(self) -> tuple[np.ndarray, ...]:
        arrays = ("dataset_index", "dataset_sample_index")
        return kept(Path(self.config.path_to_cache), _cache_name(self, self.split), arrays, self._draw, writes=dist.get_rank() == 0)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sample its dataset, [size] int16, and its number in that dataset, [size] int64."""
        which, sample = np.zeros(self.size, dtype=np.int16), np.zeros(self.size, dtype=np.int64)
        helpers.build_blending_indices(which, sample, self.weights, len(self.datasets), self.size, False)
        return which, sample


class Builder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder for the datasets here. Rank 0 builds first and writes the caches."""

    @staticmethod
    def build_generic_dataset(cls: Any, *arguments: Any) -> Any:
        return BlendedMegatronDatasetBuilder.build_generic_dataset(EpochBlend if cls is BlendedDataset else cls, *arguments)


def _cache_name(dataset: EpochDataset | EpochBlend, split: Split) -> str:
    return f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split.name}"


def description(train: Dataset, seed: int) -> dict[str, Any]:
    """Return everything that determines the order of the training data, JSON-serializable: the entry `data` of a checkpoint."""
    parts = zip(train.datasets, train.weights, strict=True) if isinstance(train, EpochBlend) else [(train, 1.0)]
    return {"order": ORDER, "seed": seed, "datasets": [_dataset(part, float(weight)) for part, weight in parts]}


def _dataset(part: Any, weight: float) -> dict[str, Any]:
    source: dict[str, str | int]
    if isinstance(part, MockDataset):
        tokens = f"{part.dataset.vocab_size} ids, {part.dataset.eod_token} ends a document"
        source = {"prefix": MOCK, "index": _digest(part.dataset.sequence_lengths.tobytes()), "content": _digest(tokens.encode())}
    else:
        file = Path(f"{part.dataset_path}.bin")
        source = {"prefix": part.dataset_path, "index": _digest(part.dataset.index.bin_buffer), "content": _content(file)}
        source["modified"] = file.stat().st_mtime_ns
    return source | {
        "weight": weight,
        "documents": [int(part.indices[0]), int(part.indices[-1]) + 1],
        "tokens": int(part.dataset.sequence_lengths[part.indices].sum(dtype=np.int64)),
    }


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(data: Path) -> str:
    """Return the SHA-256 of evenly spaced parts of a file: an index alone does not distinguish datasets with equal document lengths."""
    size, digest = data.stat().st_size, hashlib.sha256()
    with data.open("rb") as stream:
        for i in range(_PARTS):
            stream.seek(max(0, size - _PART_BYTES) * i // (_PARTS - 1))
            digest.update(stream.read(_PART_BYTES))
    return digest.hexdigest()


def check_same_data(datasets: Mapping[str, Dataset | None], tokenizer: Tokenizer, seed: int) -> None:
    """Compare the datasets and the tokenizer of all ranks. Collective.

    On clusters with node-local disks, the same path can have different tokens on another node, and no later check notices: every rank
    trains on what it reads. Paths and times may differ.

    Raises:
        ValueError: on every rank, if the data differ, with the data and the rank.
    """
    own = {"tokenizer": _digest(json.dumps(tokenizer.unique_identifiers | {"mask": tokenizer.mask}, sort_keys=True).encode())}
    for name, data in datasets.items():
        about = {"datasets": []} if data is None else description(data, seed)
        about["datasets"] = [{key: x for key, x in one.items() if key not in ("prefix", "modified")} for one in about["datasets"]]
        own[f"{name} data"] = _digest(json.dumps(about, sort_keys=True).encode())
    everywhere = [own] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    for rank, theirs in enumerate(everywhere):
        differing = [name for name in own if theirs[name] != everywhere[0][name]]
        if differing:
            raise ValueError(
                f"the ranks read different data: rank {rank} has another {' and '.join(differing)} than rank 0. Copy the same files to all "
                "machines, or use a folder that they share"
            )


def check_same(info: dict[str, Any], now: dict[str, Any] | None, data: DataConfig, *, seq_length: int, load: str | None) -> str | None:
    """Check that a resumed run continues in the data order of the checkpoint.

    Args:
        info: `checkpoint.json`; an older one has no `data`.
        now: `description` of this run's data; None if it has no data.
        data, seq_length: of this run.
        load: the folder of the checkpoint, for the message.

    Returns:
        A message with the differences that `--override-data` allows, or a note that the checkpoint does not record all of them; or None.

    Raises:
        ValueError: the order differs, and `--override-data` is not set.
    """
    if now is None or not info["iteration"]:
        return None
    saved = info.get("data")
    differing = _differing_from_config(info, data.split, seq_length, now) if saved is None else _differing(saved, now)
    differing += _differing_samples(info, data)
    if differing and not data.override_data:
        raise ValueError(
            f"the checkpoint in {load} was trained on other data, or in another order: {'; '.join(differing)}. Use the "
            f"saved data and values, or --override-data to continue at sample {info['consumed_samples']} of this run's data"
        )
    if differing:
        return f"--override-data: the data continues at sample {info['consumed_samples']} of other data: {'; '.join(differing)}"
    if saved is None:
        return "the checkpoint has no digests of its data: it is assumed to be the data of this run"
    pairs = zip(saved["datasets"], now["datasets"], strict=True)
    touched = [new["prefix"] for old, new in pairs if old.get("modified", new.get("modified")) != new.get("modified")]
    return f"{', '.join(touched)} was written again since the checkpoint: only samples of its tokens are compared" if touched else None


def _differing(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    before, after = saved["datasets"], now["datasets"]
    differing = [] if saved["order"] == now["order"] else [f"drawn as {now['order']} (saved: {saved['order']})"]
    differing += [] if saved["seed"] == now["seed"] else [f"--seed {now['seed']} (saved: {saved['seed']})"]
    if len(before) != len(after):
        return [*differing, f"{len(after)} datasets (saved: {len(before)})"]
    for old, new in zip(before, after, strict=True):
        prefix = new["prefix"]
        if old["index"] != new["index"]:
            differing.append(f"{prefix} is not the same dataset as {old['prefix']}")
        elif old["content"] != new["content"]:
            differing.append(f"{prefix} has other tokens than {old['prefix']}, in documents of the same lengths")
        elif old["documents"] != new["documents"]:
            differing.append("documents {} to {} of {} (saved: {} to {}), see --split".format(*new["documents"], prefix, *old["documents"]))
        if not math.isclose(old["weight"], new["weight"], rel_tol=1e-9):
            differing.append(f"weight {new['weight']:.6g} of {prefix} (saved: {old['weight']:.6g})")
    return differing


def _differing_samples(info: dict[str, Any], data: DataConfig) -> list[str]:
    """Return the flags that make other samples of the same tokens, with their values here and in the checkpoint."""
    saved, default = info["config"].get("data", {}), DataConfig()  # a setting that the checkpoint does not have had its default
    pairs = [(name, getattr(data, name), saved.get(name, getattr(default, name))) for name in _OF_SAMPLES]
    return [f"{flag(name)} {now} (saved: {then})" for name, now, then in pairs if now != then]


def _differing_from_config(info: dict[str, Any], split: str, length: int, now: dict[str, Any]) -> list[str]:
    """Return the differences for a checkpoint without `data`, from its configuration."""
    saved = config_from_dict(info["config"])
    seed = saved.training.seed
    differing = [] if seed == now["seed"] else [f"--seed {now['seed']} (saved: {seed})"]
    differing += [] if split == saved.data.split else [f"--split {split} (saved: {saved.data.split})"]
    samples = saved.training.train_samples or (saved.training.train_iters or 0) * info["consumed_samples"] // info["iteration"]
    for part in now["datasets"]:
        share = samples if len(now["datasets"]) == 1 else math.ceil(math.ceil(samples * part["weight"]) * _SURPLUS)
        if share * length + 1 > part["tokens"]:
            differing.append(f"more than one epoch of {part['prefix']}, which the version that wrote it shuffled together, unlike this one")
    return differing
