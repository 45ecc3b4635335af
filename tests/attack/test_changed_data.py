"""Data that change under a run, or of which no token counts: each ends the run with a line, and nothing broken is saved."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from helpers import tiny
from megatron.lm.config.sections.training import DEFAULT_SPLIT
from megatron.lm.errors import RunStopped

EOD = tiny.VOCABULARY - 1
SHORT = {"save_interval": 2, "max_skipped_steps": 5}


def filled(prefix: Path, token: int) -> None:
    """Every token of a dataset becomes `token`, in place."""
    size = os.path.getsize(f"{prefix}.bin")
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.write(np.full(size // 2, token, np.uint16).tobytes())


@pytest.mark.promise("Data", "A run in which no token counts in the loss says so at each step, stops, and saves nothing as healthy.")
@pytest.mark.parametrize("iterations", [3, 30])
def test_no_token_counts(tmp_path: Path, iterations: int, capsys: pytest.CaptureFixture[str]):
    prefix = tiny.write_data(tmp_path)
    filled(prefix, EOD)
    settings = {
        "train_iters": iterations,
        "eod_mask_loss": True,
        "save": str(tmp_path / "save"),
        "save_interval": 2,
        "max_skipped_steps": 5,
    }
    with pytest.raises(RunStopped, match=rf"{min(iterations, 5)} steps in a row, the last one at iteration .* without --eod-mask-loss"):
        tiny.run(tiny.config(prefix, **settings))
    said = capsys.readouterr().out
    assert "iteration 1 has no token that counts in the loss (1 in a row, the run stops at 5)" in said
    assert "iter_0000002, which is unhealthy: iteration 2 has no token that counts in the loss" in said
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


def test_no_token_counts_in_an_evaluation(tmp_path: Path):
    prefix, other = tiny.write_data(tmp_path), tiny.write_data(tmp_path, "other")
    filled(other, EOD)
    paths = {"data_path": [], "train_data_path": [str(prefix)], "valid_data_path": [str(other)], "split": DEFAULT_SPLIT}
    settings = tiny.config(prefix, train_iters=2, eval_iters=1, eod_mask_loss=True, **paths)
    with pytest.raises(RunStopped, match="the evaluation of 1 iterations has no token that counts in the loss"):
        tiny.run(settings)


@pytest.mark.promise("Data", "A resume with a changed token is refused if a sample covers it, and otherwise logs that the file changed.")
@pytest.mark.parametrize("place", [1, 50_003, 499_998])
def test_a_changed_token_is_noticed_at_resume(tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]):
    prefix, save = tmp_path / "corpus", str(tmp_path / "save")
    made = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for number in range(500):
        made.add_document(torch.arange(number, number + 1000) % EOD, [1000])
    made.finalize(f"{prefix}.idx")
    settings = {"num_layers": 1, "precision": "bf16", "save": save}
    tiny.run(tiny.config(prefix, train_iters=1, **settings))
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    tokens[place] = (tokens[place] + 1) % EOD
    tokens.flush()
    if place == 50_003:  # between two samples
        tiny.run(tiny.config(prefix, train_iters=2, load=save, **settings | {"save": None}))
        assert f"{prefix} was written again since the checkpoint" in capsys.readouterr().out
    else:
        with pytest.raises(ValueError, match="corpus has other tokens than"):
            tiny.run(tiny.config(prefix, train_iters=2, load=save, **settings))
    assert [path.name for path in (tmp_path / "save").glob("iter_*")] == ["iter_0000001"]
