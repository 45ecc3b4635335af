"""Checks at the start that all ranks read the same data.

On clusters whose nodes have disks of their own, the same path can hold other tokens on another node, and nothing later notices: every rank
trains on what it reads. So ranks compare what the data contains, and not where it is.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.lm.data.order import description
from megatron.lm.data.tokenizer import Tokenizer

_WHAT = {
    "index": "has documents of other lengths than",
    "content": "holds other tokens than",
    "documents": "gives other documents than",
    "weight": "has another weight than",
}


def check_same_data(datasets: Mapping[str, Dataset | None], tokenizer: Tokenizer, seed: int) -> None:
    """Compare the datasets and the tokenizer of all ranks. Collective.

    Args:
        datasets: of `build_datasets`, by the name of their split.
        tokenizer: that of the data.
        seed: of the order of the data.

    Raises:
        ValueError: on every rank, where they differ; it names the data and the rank.
    """
    about: dict[str, Any] = {"tokenizer": tokenizer.unique_identifiers | {"mask": tokenizer.mask}}
    about |= {name: None if data is None else description(data, seed) for name, data in datasets.items()}
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(about))
    if len(set(digests)) == 1:
        return
    everywhere: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, about)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise ValueError(
        f"the ranks read different data: {difference(everywhere[0], everywhere[other], other)}. Copy the same files to all machines, or "
        "name a folder that they share"
    )


def _digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of what is read, without the paths."""
    contents = {name: _without_paths(value) for name, value in about.items()}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _without_paths(value: Any) -> Any:
    if not isinstance(value, dict) or "datasets" not in value:
        return value
    return value | {"datasets": [{key: x for key, x in one.items() if key != "prefix"} for one in value["datasets"]]}


def difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """The first difference between what rank 0 and rank `rank` read, as words."""
    if first["tokenizer"] != other["tokenizer"]:
        return f"the tokenizer of rank {rank} is {other['tokenizer']}, that of rank 0 {first['tokenizer']}"
    for name in first:
        ours, theirs = first[name], other[name]
        if (ours is None) != (theirs is None):
            return f"there is {name} data on rank {rank if ours is None else 0} alone"
        pairs = list(zip(ours["datasets"], theirs["datasets"], strict=False)) if name != "tokenizer" and ours is not None else []
        for mine, there in pairs:
            for key, words in _WHAT.items():
                if mine[key] != there[key]:
                    return f"the {name} data {there['prefix']} of rank {rank} {words} {mine['prefix']} of rank 0"
        if pairs and len(ours["datasets"]) != len(theirs["datasets"]):
            return f"the {name} data of rank {rank} are {len(theirs['datasets'])} datasets, those of rank 0 {len(ours['datasets'])}"
    return f"rank {rank} draws another order than rank 0"
