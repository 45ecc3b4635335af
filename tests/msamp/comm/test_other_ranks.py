"""Parameters that other ranks average: their divisor, their owners, and what they do not support."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from helpers.synced import model_of, synced
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.counters import WireBytes
from msamp.comm.sync_checks import check_same_on_all_ranks
from msamp.numerics.formats import BF16
from msamp.numerics.tensor import fp32_values

SHAPES = {"fp8-e4m3_shared": (8, 16), "fp8-e4m3_expert": (8, 16), "bf16_expert": (4, 6), "fp32_expert": (5,), "fp32_shared": (7,)}
WEIGHT = 0.25


def gradient(name: str, rank: int) -> Tensor:
    """Powers of two, so that every format is exact."""
    return torch.full(SHAPES[name], 2.0 ** (rank + len(name) % 3))


def averages(copies: int, shard: bool, accumulate: str, micro_batches: int) -> tuple[int, dict[str, Any]]:
    """What this of four ranks gets where `copies` ranks average the experts: values, and their number."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group(list(range(first, first + copies))) for first in range(0, 4, copies)]
    model = model_of(SHAPES)
    experts = [p for name, p in model.named_parameters() if name.endswith("expert")]
    others = OtherRanks(Peers(groups[rank // copies], WireBytes()), experts, WEIGHT)
    sync = synced(model, torch.distributed.group.WORLD, others=others, shard=shard, accumulate=accumulate)
    for number in range(micro_batches):
        for name, p in reversed(list(model.named_parameters())):
            p.grad = gradient(name, rank)
            if number < micro_batches - 1:
                with sync.no_sync():
                    sync.take(p)
            else:
                sync.take(p)
    sync.finish()
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        pieces = [piece.grad for piece in sync.owned(p)] if shard else [p.main_grad]
        found[name] = [(set(fp32_values(g).flatten().tolist()), g.numel()) for g in pieces]
    return rank, found


@pytest.mark.parametrize(
    ("copies", "shard", "accumulate", "micro_batches"),
    [(1, False, "bf16", 1), (2, True, "bf16", 2), (2, False, "owner", 2), pytest.param(1, True, "owner", 2, marks=pytest.mark.nightly)],
)
def test_the_average_is_the_weighted_mean_of_their_ranks(copies: int, shard: bool, accumulate: str, micro_batches: int):
    elements: dict[tuple[int, str], int] = {}
    for rank, found in dist.run(averages, 4, copies, shard, accumulate, micro_batches):
        first = rank // copies * copies
        for name, pieces in found.items():
            expert = name.endswith("expert")
            members = range(first, first + copies) if expert else range(4)
            mean = sum(float(gradient(name, member).flatten()[0]) for member in members) / len(members)
            for values, count in pieces:
                [value] = values
                assert value == pytest.approx(micro_batches * mean * (WEIGHT if expert else 1), rel=2**-4 if "fp8" in name else 2**-8)
                key = (first if expert else 0, name)
                elements[key] = elements.get(key, 0) + count
    copies_of = {True: 1, False: 4}
    for (_, name), count in elements.items():
        each = 1 if shard else (copies if name.endswith("expert") else copies_of[False])
        assert count == each * torch.Size(SHAPES[name]).numel(), name


def test_what_nobody_averages_needs_no_stream():
    model = model_of(SHAPES)
    sync = synced(model, others=OtherRanks(Peers(None, WireBytes()), list(model.values()), 0.5))
    sync.sender.peers, sync.sender._stream = SimpleNamespace(ranks=2), object()  # type: ignore[assignment]
    sum(p.sum() for p in model.values()).backward()
    sync.finish()  # nor does this wait for one: it would fail in a capture that launched nothing there
    assert {float(fp32_values(p.main_grad).mean()) for p in model.values()} == {0.5}


def test_what_is_refused():
    model = model_of(SHAPES)
    alone = Peers(None, WireBytes())
    others = OtherRanks(alone, [model["fp32_expert"]], 0.5)
    with pytest.raises(ValueError, match="gradient scaling 'auto' does not support parameters that other ranks average"):
        synced(model, exchange="nccl", others=others)


def verdicts() -> list[str]:
    """What two ranks with the same weight, and one expert each, are told: with the experts apart, and without."""
    rank = torch.distributed.get_rank()
    shared, expert = torch.zeros(2), torch.zeros(3)
    names, formats = {shared: "weight", expert: f"expert.{rank}"}, {shared: BF16, expert: BF16}
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    said = []
    for others in (OtherRanks(Peers(None, WireBytes()), [expert], 0.5), None):
        try:
            check_same_on_all_ranks(names, formats, peers, others)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_experts_of_other_ranks_are_other_parameters():
    for apart, together in dist.run(verdicts, 2):
        assert apart == ""
        assert "where rank 0 has expert.0 (3,) torch.float32, gradient bf16, rank 1 has expert.1" in together
