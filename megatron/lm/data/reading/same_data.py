"""Checks at the start that all ranks read the same data.

On clusters with node-local disks, the same path can have different tokens on another node, and no later check notices: every rank trains
on what it reads. The ranks therefore compare the content of the data, not its path.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.lm.data.reading.order import description
from megatron.lm.data.tokenizers.tokenizer import Tokenizer

_WHAT = {
    "index": "has documents of other lengths than",
    "content": "has other tokens than",
    "documents": "provides other documents than",
    "weight": "has another weight than",
}


def check_same_data(datasets: Mapping[str, Dataset | None], tokenizer: Tokenizer, seed: int) -> None:
    """Compare the datasets and the tokenizer of all ranks. Collective.

    Args:
        datasets: from `build_datasets`, by name of the split.
        tokenizer: of the data.
        seed: of the data order.

    Raises:
        ValueError: on every rank, if the data differ, with the data and the rank.
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
        "use a folder that they share"
    )


def _digest(about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the data, without paths and times, which differ between machines."""
    contents = {name: _without_paths(value) for name, value in about.items()}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _without_paths(value: Any) -> Any:
    if not isinstance(value, dict) or "datasets" not in value:
        return value
    return value | {"datasets": [{key: x for key, x in one.items() if key not in ("prefix", "modified")} for one in value["datasets"]]}


def difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Describe the first difference between the data of rank 0 and of rank `rank`."""
    if first["tokenizer"] != other["tokenizer"]:
        return f"the tokenizer of rank {rank} is {other['tokenizer']}, rank 0's is {first['tokenizer']}"
    for name in first:
        ours, theirs = first[name], other[name]
        if (ours is None) != (theirs is None):
            return f"only rank {rank if ours is None else 0} has {name} data"
        pairs = list(zip(ours["datasets"], theirs["datasets"], strict=False)) if name != "tokenizer" and ours is not None else []
        for here, there in pairs:
            for key, words in _WHAT.items():
                if here[key] != there[key]:
                    return f"the {name} data {there['prefix']} of rank {rank} {words} {here['prefix']} of rank 0"
        if pairs and len(ours["datasets"]) != len(theirs["datasets"]):
            return f"the {name} data of rank {rank} has {len(theirs['datasets'])} datasets, rank 0's has {len(ours['datasets'])}"
    return f"rank {rank} reads the data in another order than rank 0"
