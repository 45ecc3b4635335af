"""What the grid answers: which ranks count, begin, end and sum."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import dist, tiny
from megatron.lm.checkpoint import content, rng
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.model.gpt import mean_loss
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import ALONE, Grid, Ranks
from megatron.lm.training.optimizer import global_norm

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP = {"num_layers_per_virtual_pipeline_stage": 1}


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


def test_sums_beside_the_average():
    norm, tied, plain = parameter(sequence_parallel=True), parameter(shared_embedding=True), parameter()
    ends, shards = Ranks(0, 2), Ranks(1, 4)
    (first, embeddings), (second, norms) = Grid(embedding=ends, tensor=shards).sums(iter([norm, tied, plain]))
    assert (first, second) == (ends, shards)
    assert [p is tied for p in embeddings] == [True]
    assert [p is norm for p in norms] == [True]
    assert Grid().gradients(plain) == ALONE


PURPOSES = tuple(field.name for field in fields(Grid) if field.name != "chunks")
EIGHT = [
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "context_parallel_size": 4},
]


def members(ranks: Ranks) -> list[int]:
    return [torch.distributed.get_rank()] if ranks.group is None else torch.distributed.get_process_group_ranks(ranks.group)


@pytest.fixture
def eight() -> Iterator[Callable[[int], None]]:
    """Become one of eight processes, whose collectives do nothing."""

    def become(rank: int) -> None:
        process_groups.shutdown()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)

    yield become
    process_groups.shutdown()


@pytest.mark.parametrize("sizes", EIGHT, ids=lambda sizes: " ".join(f"{name.split('_size')[0]} {size}" for name, size in sizes.items()))
def test_groups_of_eight_ranks_are_those_of_megatron_core(sizes: dict[str, int], eight: Callable[[int], None]):
    config = tiny.config("corpus", num_layers=4, **sizes)
    axes = config.parallel.axes(8)
    assert axes.tensor * axes.context * axes.data * axes.pipeline == 8
    assert axes.expert_tensor * axes.expert * axes.expert_data == axes.tensor * axes.copies
    dense = RankGenerator(tp=axes.tensor, ep=1, dp=axes.data, pp=axes.pipeline, cp=axes.context, order="tp-cp-ep-dp-pp")
    sparse = RankGenerator(tp=axes.expert_tensor, ep=axes.expert, dp=axes.expert_data, pp=axes.pipeline, cp=1, order="tp-cp-ep-dp-pp")
    expected = {
        "copies": (dense, "dp-cp"),
        "batch": (dense, "dp"),
        "context": (dense, "cp"),
        "tensor": (dense, "tp"),
        "pipeline": (dense, "pp"),
        "scales": (dense, "tp-dp-cp"),
        "model": (dense, "tp-pp"),
        "experts": (sparse, "ep"),
        "expert_tensor": (sparse, "tp"),
        "expert_copies": (sparse, "dp"),
        "expert_model": (sparse, "tp-ep-pp"),
    }
    for rank in (0, 3, 5, 6):
        eight(rank)
        process_groups.create_groups(config.parallel, None, timedelta(minutes=1))
        grid = Grid.current()
        for purpose, (generator, axis) in expected.items():
            assert members(getattr(grid, purpose)) == next(group for group in generator.get_ranks(axis) if rank in group), purpose
        sizes_found = (grid.tensor.size, grid.context.size, grid.batch.size, grid.pipeline.size, grid.copies.size)
        assert sizes_found == (axes.tensor, axes.context, axes.data, axes.pipeline, axes.copies)
        assert (grid.expert_tensor.size, grid.experts.size, grid.expert_copies.size) == (axes.expert_tensor, axes.expert, axes.expert_data)
        if not axes.splits_experts and axes.context == 1:
            assert (grid.expert_copies, grid.expert_model) == (grid.copies, grid.model)  # one gradient synchronizer serves both


def on_four() -> dict[str, Any]:
    """On two pairs of ranks, of which each shares a sequence: groups, a mean over a sequence, its gradient, who writes a checkpoint. Then
    the norm of experts on two ranks."""
    process_groups.create_groups(tiny.config("corpus", context_parallel_size=2).parallel, None, timedelta(minutes=1))
    grid, rank = Grid.current(), torch.distributed.get_rank()
    model = nn.Linear(2, 3, bias=False)
    model.weight.data.fill_(1.0)
    model.config = SimpleNamespace()  # type: ignore[assignment]
    config = tiny.config("corpus", precision="fp32")
    sync = tiny.synchronizer(model, config, build_recipe(config.precision), grid=grid)
    mask = (torch.arange(4) < [1, 3, 2, 0][rank]).float()[None]  # tokens that count in each part
    mean, report = mean_loss((model(torch.full((4, 2), rank + 1.0)).sum(-1) * mask[0]).sum(), mask, grid.context)
    mean.backward()
    sync.finish()
    share = content._Share()
    found = {
        "groups": {purpose: members(getattr(grid, purpose)) for purpose in PURPOSES},
        "mean": (float(mean), float(report["tokens"])),
        "gradient": [average.unique().tolist() for _, _, average in sync.averages() if average is not None],
        "written": [n for n in range(8) if share.of_this_rank([Item.whole(str(n), torch.zeros(4))], grid.gradients(model.weight))],
        "random states": rng.own_number(grid),
    }
    process_groups.leave_grid()
    process_groups.create_groups(tiny.config("corpus", expert_model_parallel_size=2).parallel, None, timedelta(minutes=1))
    norm = global_norm([parameter(), parameter(allreduce=False)])
    found["norm"] = float(norm(torch.tensor([3.0, 4.0 * (1 + Grid.current().experts.rank)], dtype=torch.float64)))
    process_groups.leave_grid()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="four processes on one GPU")
def test_two_parts_of_two_sequences_on_four_processes():
    for rank, found in enumerate(dist.run(on_four, 4)):
        pair, everyone = [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]
        wide = {"context": pair, "batch": [rank % 2, rank % 2 + 2], "copies": everyone, "scales": everyone, "expert_copies": everyone}
        assert found["groups"] == {purpose: wide.get(purpose, [rank]) for purpose in PURPOSES}
        # Losses of a token are 6, 12, 18 and 24: one sequence has the mean (6 + 3 x 12) / 4 = 10.5, the other 18.
        assert found["mean"] == [(3.0, 1.0), (18.0, 3.0), (36.0, 2.0), (0.0, 0.0)][rank]
        assert found["gradient"] == [[(1.75 + 3.0) / 2]]
        assert found["written"] == [rank, rank + 4]
        assert found["random states"] == rank
        assert found["norm"] == (9 + 16 + 64) ** 0.5


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
        together = {
            "DP": {"copies", "batch", "scales", "expert_copies"},
            "TP": {"tensor", "scales", "model", "expert_tensor", "expert_model"},
            "PP": {"pipeline", "model", "embedding", "expert_model"},
        }
        for name, purposes in together.items():
            assert {p: found[name][p] for p in PURPOSES} == {p: both if p in purposes else alone for p in PURPOSES}, name
            assert found[name]["chunks"] == (2 if name == "PP" else 1)
