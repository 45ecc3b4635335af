"""Ranks that read different data are refused, all of them, whatever the paths."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from helpers import dist, tiny
from megatron.lm.data.reading.same_data import difference


def changed_token(prefix: Path) -> None:
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    tokens[5] += 1
    tokens.tofile(f"{prefix}.bin")


def started(prefixes: list[Path]) -> str:
    """What a start says, where each rank has a path of its own."""
    try:
        with tiny.trainer(tiny.config(prefixes[torch.distributed.get_rank()], train_iters=1)):
            return ""
    except ValueError as error:
        return str(error)


@pytest.mark.promise("Starting and ending", "Ranks whose files hold different data are refused before the first step.")
@pytest.mark.parametrize(("change", "what"), [(None, ""), (changed_token, "has other tokens than")], ids=["same", "a token"])
def test_all_ranks_refuse_data_that_differs(gloo_prefix: Path, tmp_path: Path, change: Callable[[Path], None] | None, what: str):
    prefixes = [Path(shutil.copytree(gloo_prefix.parent, tmp_path / name)) / gloo_prefix.name for name in ("a", "b")]
    if change is not None:
        change(prefixes[1])
    first, second = dist.run(started, 2, prefixes)
    assert first == second
    if what:
        assert f"the ranks read different data: the training data {prefixes[1]} of rank 1 {what} {prefixes[0]} of rank 0. Copy" in first
    else:
        assert first == ""


def about(**changes: Any) -> dict[str, Any]:
    """What a rank reads, as `check_same_data` describes it."""
    one = {"prefix": "a", "weight": 1.0, "documents": [0, 9], "tokens": 90, "index": "i", "content": "c"} | changes
    return {"tokenizer": {"vocab_size": 60}, "training": {"order": "o", "seed": 1, "datasets": [one]}, "test": None}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (about(index="j", prefix="b"), "the training data b of rank 3 has documents of other lengths than a of rank 0"),
        (about(documents=[0, 8]), "the training data a of rank 3 provides other documents than a of rank 0"),
        (about(weight=2.0), "the training data a of rank 3 has another weight than a of rank 0"),
        (about() | {"tokenizer": {"vocab_size": 61}}, "the tokenizer of rank 3 is {'vocab_size': 61}, rank 0's is {'vocab_size': 60}"),
        (about() | {"test": about()["training"]}, "only rank 3 has test data"),
        (about() | {"training": None}, "only rank 0 has training data"),
        (
            about() | {"training": {"datasets": about()["training"]["datasets"] * 2}},
            "the training data of rank 3 has 2 datasets, rank 0's has 1",
        ),
        (about() | {"training": about()["training"] | {"order": "p"}}, "rank 3 reads the data in another order than rank 0"),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], words: str):
    assert difference(about(), other, 3) == words
