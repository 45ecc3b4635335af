"""What the grid answers: which ranks count, begin, end and sum."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import dist, tiny
from megatron.lm.config.precision import build_recipe
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import ALONE, Grid, Ranks
from megatron.lm.training.gradients import build_grad_sync

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, VPP = {"sequence_parallel": True}, {"num_layers_per_virtual_pipeline_stage": 1}


def parameter(**marks: bool) -> Tensor:
    """A parameter with megatron-core's marks."""
    p = nn.Parameter(torch.zeros(2))
    for name, value in marks.items():
        setattr(p, name, value)
    return p


# Marks, tensor-parallel rank, data-parallel rank -> does the rank count for it in a sum over `model`, and in one over all ranks?
COUNTS = [
    ({}, 0, 0, True, True),
    ({}, 1, 0, False, False),
    ({}, 0, 1, True, False),
    ({"tensor_model_parallel": True}, 1, 0, True, True),
    ({"tensor_model_parallel": True}, 1, 1, True, False),
    ({"tensor_model_parallel": True, "shared": True}, 0, 0, False, False),
    ({"shared_embedding": True}, 0, 0, True, True),
]


@pytest.mark.parametrize(("marks", "tensor", "data", "in_model", "of_all"), COUNTS)
def test_every_element_counts_once(marks: dict[str, bool], tensor: int, data: int, in_model: bool, of_all: bool):
    grid = Grid(tensor=Ranks(tensor, 2), copies=Ranks(data, 2))
    assert grid.counts(parameter(**marks), every_copy=True) is in_model
    assert grid.counts(parameter(**marks), every_copy=False) is of_all


@pytest.mark.parametrize("chunks_a_stage", [1, 2])
def test_the_model_begins_and_ends_once(chunks_a_stage: int):
    grids = [Grid(pipeline=Ranks(rank, 3), chunks=chunks_a_stage) for rank in range(3)]
    places = [(chunk, grid) for chunk in range(chunks_a_stage) for grid in grids]
    count = len(places)
    assert [grid.is_first_stage(chunk) for chunk, grid in places] == [True] + [False] * (count - 1)
    assert [grid.is_last_stage(chunk) for chunk, grid in places] == [False] * (count - 1) + [True]
    if chunks_a_stage == 1:
        assert [grid.is_first_stage() for grid in grids] == [True, False, False]
    else:
        with pytest.raises(ValueError, match="a pipeline stage has 2 chunks of the model: pass `chunk` in 0 to 1"):
            grids[0].is_last_stage()


def test_sums_beside_the_average():
    norm, tied, plain = parameter(sequence_parallel=True), parameter(shared_embedding=True), parameter()
    ends, shards = Ranks(0, 2), Ranks(1, 4)
    (first, embeddings), (second, norms) = Grid(embedding=ends, tensor=shards).sums(iter([norm, tied, plain]))
    assert (first, second) == (ends, shards)
    assert [p is tied for p in embeddings] == [True]
    assert [p is norm for p in norms] == [True]
    assert Grid().gradients(plain) == ALONE


class WithExperts(Grid):
    """A further axis: experts have fewer copies than the rest, told by megatron-core's mark."""

    def gradients(self, parameter: Tensor) -> Ranks:
        return self.copies if getattr(parameter, "allreduce", True) else Ranks(self.copies.rank // 2, self.copies.size // 2)


def test_an_expert_axis_answers_by_parameter_and_one_synchroniser_for_two_averages_is_refused():
    expert, grid = parameter(allreduce=False), WithExperts(copies=Ranks(1, 4))
    assert (grid.gradients(expert), grid.gradients(parameter())) == (Ranks(0, 2), Ranks(1, 4))
    assert grid.counts(expert, every_copy=False)
    assert not grid.counts(parameter(), every_copy=False)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight.allreduce = False  # type: ignore[assignment, union-attr]
    config = tiny.config("corpus", precision="bf16")
    with pytest.raises(ValueError, match="averaged over 2 different groups of ranks, but GradSync supports one"):
        build_grad_sync(model, config, build_recipe(config.precision), grid=grid)


PURPOSES = ("copies", "batch", "tensor", "pipeline", "scales", "model", "embedding")


def on_two() -> dict[str, dict[str, Any]]:
    """The current grid of three layouts: rank and size by purpose, the sum of ranks over each group, chunks."""
    found = {}
    for name, sizes in {"DP": {}, "TP": TP2, "PP": PP2 | VPP}.items():
        process_groups.initialize(tiny.config("corpus", num_layers=4, global_batch_size=8, distributed_backend="gloo", **sizes))
        grid = Grid.current()
        assert grid == Grid.current()
        seen: dict[str, Any] = {"chunks": grid.chunks}
        for purpose in PURPOSES:
            ranks = getattr(grid, purpose)
            number = torch.tensor(torch.distributed.get_rank() + 1)
            if ranks.group is not None:
                torch.distributed.all_reduce(number, group=ranks.group)
            seen[purpose] = (ranks.rank, ranks.size, int(number))
        found[name] = seen
        process_groups.leave_grid()
    process_groups.shutdown()
    with pytest.raises(RuntimeError, match=r"groups were destroyed.*Grid\.current"):
        _ = grid.model.group
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_groups_of_two_processes_by_purpose():
    for rank, found in enumerate(dist.run(on_two, 2, init=False)):
        both, alone = (rank, 2, 3), (0, 1, rank + 1)
        together = {"DP": {"copies", "batch", "scales"}, "TP": {"tensor", "scales", "model"}, "PP": {"pipeline", "model", "embedding"}}
        for name, purposes in together.items():
            assert {p: found[name][p] for p in PURPOSES} == {p: both if p in purposes else alone for p in PURPOSES}, name
            assert found[name]["chunks"] == (2 if name == "PP" else 1)


def test_only_the_grid_and_its_maker_ask_megatron_core_for_groups():
    root = Path(__file__).parents[4]
    files = [path for top in ("megatron", "tools") for path in (root / top).rglob("*.py")]
    asking = {path.relative_to(root).as_posix() for path in files if re.search(r"\bparallel_state\b", path.read_text(encoding="utf-8"))}
    assert asking == {"megatron/lm/processes/grid.py", "megatron/lm/processes/process_groups.py"}
