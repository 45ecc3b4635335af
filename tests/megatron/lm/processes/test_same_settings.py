"""Ranks that were started with different settings are refused, all of them, before anything is done."""

from pathlib import Path

import pytest
import torch.distributed

from helpers import dist, tiny
from megatron.lm.config.cli import settings_by_name
from megatron.lm.processes.same_settings import described, differences

# One change per kind of setting; `places` are where a machine has its own files.
CHANGES = {
    "--lr": {"lr": 0.1},
    "--seed": {"seed": 7},
    "--weight-decay": {"weight_decay": 0.2},
    "--clip-grad": {"clip_grad": 0.5},
    "--micro-batch-size": {"micro_batch_size": 2, "global_batch_size": 8},
    "--tensor-model-parallel-size": {"tensor_model_parallel_size": 2},
    "--save-interval": {"save_interval": 3},
    "--load": {"load": "elsewhere"},
    "--opt-level": {"opt_level": "O1"},
    "--record-precision": {"record_precision": "r.jsonl"},
}


def refused(prefix: Path, changes: dict, rank: int) -> str:
    """What a start says, where `rank` has other settings."""
    mine = changes if torch.distributed.get_rank() == rank else {}
    settings = tiny.config(prefix, **({"opt_level": "O2", "global_batch_size": 8} | mine))
    try:
        with tiny.started(settings):
            return ""
    except ValueError as error:
        return str(error)


@pytest.mark.promise("Starting and ending", "Ranks with different settings are refused before the first step, by flag and rank.")
@pytest.mark.parametrize("name", ["--lr", "--tensor-model-parallel-size"])
def test_all_ranks_refuse_and_name_flag_and_rank(prefix: Path, name: str):
    first, second = dist.run(refused, 2, prefix, CHANGES[name], 1)
    assert first == second
    assert f"the ranks have different settings: {name} is " in first
    assert first.endswith(" on rank 1. Start all of them with the same command")


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_counts(name: str):
    before = described(settings_by_name(tiny.config("corpus", opt_level="O2", global_batch_size=8)))
    after = described(settings_by_name(tiny.config("corpus", **({"opt_level": "O2", "global_batch_size": 8} | CHANGES[name]))))
    assert name in differences([before, after, before])
