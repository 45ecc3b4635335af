"""Ranks that read different data are refused, all of them, whatever the paths."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed

from helpers import dist, tiny


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
@pytest.mark.parametrize(("change", "what"), [(None, ""), (changed_token, "rank 1 has another training data")], ids=["same", "a token"])
def test_all_ranks_refuse_data_that_differs(gloo_prefix: Path, tmp_path: Path, change: Callable[[Path], None] | None, what: str):
    prefixes = [Path(shutil.copytree(gloo_prefix.parent, tmp_path / name)) / gloo_prefix.name for name in ("a", "b")]
    if change is not None:
        change(prefixes[1])
    first, second = dist.run(started, 2, prefixes)
    assert first == second
    assert what in first
    assert bool(what) == bool(first)
