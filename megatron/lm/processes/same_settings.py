"""Checks at the start that all ranks have the same settings.

No other check notices a difference: collectives only require equal shapes, which a learning rate, a seed or a weight decay does not change.
Such ranks would train to the end with different copies of the weights, and none of their checkpoints could be resumed. The ranks compare
their settings through the rendezvous store, before there are process groups, since groups of different grids would wait for each other.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed import Store

from megatron.lm.config import flag

# Paths that only some ranks may set: only rank 0 uses them, or each rank uses its own.
_FREE = frozenset(
    ["save", "tensorboard_dir", "metrics_file", "fp8_gain_cache", "data_cache_path", "wandb_save_dir", "memory_snapshot_path"]
)
_DATA = frozenset(["data_path", "train_data_path", "valid_data_path", "test_data_path", "tokenizer_model", "vocab_file", "merge_file"])
# Files and folders whose paths may differ between machines: what a run writes, and data, whose content `check_same_data` compares.
PLACES = _FREE | _DATA | {"record_precision"}
READ_SECONDS = 10.0  # how long rank 0, which hosts the store, waits for the others to read why the run ends
_LISTED = 4  # ranks that a message lists


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks, by flag: settings (for `PLACES`, whether they are set) and package versions."""
    described_settings = {flag(name): bool(value) if name in PLACES else value for name, value in settings.items() if name not in _FREE}
    packages = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    return described_settings | {f"the version of {name}": str(number) for name, number in packages.items()}


def check_same_settings(store: Store, rank: int, world_size: int, settings: Mapping[str, Any]) -> None:
    """Compare `described` on all ranks through the rendezvous store. Every rank must call this the same number of times.

    Raises:
        ValueError: on every rank, if settings differ; it names each flag, its values and their ranks.
    """
    if world_size == 1:
        return
    call = store.add(f"settings/calls/{rank}", 1)  # the store may outlive several runs of these processes
    own_key, verdict = f"settings/{call}/{rank}", f"settings/{call}/verdict"
    if rank:
        store.set(own_key, json.dumps(described(settings)))
        problem = store.get(verdict).decode()
        store.add(f"settings/{call}/read", 1)
    else:
        others = [json.loads(store.get(f"settings/{call}/{other}")) for other in range(1, world_size)]
        problem = differences([json.loads(json.dumps(described(settings))), *others])
        store.set(verdict, problem)
        end = time.monotonic() + READ_SECONDS
        while problem and store.add(f"settings/{call}/read", 0) < world_size - 1 and time.monotonic() < end:
            time.sleep(0.01)
    if problem:
        raise ValueError(f"the ranks have different settings: {problem}. Start all of them with the same command")


def differences(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with the settings, by name, that differ between ranks, their values and their ranks; empty if all agree."""
    lines = []
    for name in dict.fromkeys(name for of_rank in settings for name in of_rank):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, of_rank in enumerate(settings):
            ranks[json.dumps(of_rank[name]) if name in of_rank else "unknown"].append(rank)
        if len(ranks) > 1:
            lines.append(f"{name} is {', '.join(f'{value} on {listed(of)}' for value, of in ranks.items())}")
    return "; ".join(lines)


def listed(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 1`, or `ranks 0, 1, 2, 3 and 4 more`."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_LISTED]))}{more}"
