"""Ranks that were started with different settings are refused, all of them, before anything is done."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed

from helpers import dist, tiny
from megatron.lm.config.cli import section_types
from megatron.lm.processes.same_settings import PLACES, check_same_settings, described, differences, listed

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
    before = described(tiny.config("corpus", opt_level="O2", global_batch_size=8))
    after = described(tiny.config("corpus", **({"opt_level": "O2", "global_batch_size": 8} | CHANGES[name])))
    assert name in differences([before, after, before])


def test_places_may_differ_and_nothing_else():
    """Paths of outputs and of data; of those that other ranks must know of, whether they are given."""
    settings = tiny.config("a/corpus", record_precision="a", tokenizer_model="t.json", save="s")
    other = tiny.config("b/corpus", record_precision="b", tokenizer_model="u/t.json", metrics_file="m", data_cache_path="c")
    assert not differences([described(settings), described(other)])
    known = {name for cls in section_types().values() for name in cls.__dataclass_fields__}
    assert known >= PLACES
    lacking = replace(settings, logging=replace(settings.logging, record_precision=None))
    assert differences([described(settings), described(lacking)]) == "--record-precision is true on rank 0, false on rank 1"


def test_what_differs_is_listed_with_its_ranks():
    settings = [{"--lr": 0.1, "--seed": 1}, {"--lr": 0.1, "--seed": 2}, {"--lr": 0.5}]
    assert differences(settings) == ("--lr is 0.1 on ranks 0, 1, 0.5 on rank 2; --seed is 1 on rank 0, 2 on rank 1, unknown on rank 2")
    assert listed(range(9)) == "ranks 0, 1, 2, 3 and 5 more"


def test_one_process_asks_nobody():
    check_same_settings(torch.distributed.HashStore(), 0, 1, tiny.config("corpus"))


def test_the_same_store_serves_a_second_run(prefix: Path):
    assert dist.run(twice, 2, prefix) == [["", ""], ["", ""]]


def twice(prefix: Path) -> list[str]:
    said = [refused(prefix, {}, 1), refused(prefix, {}, 1)]
    torch.distributed.barrier()  # a rank that leaves would fail one that still connects to it
    return said
