"""Copies of weights on several ranks: bits that differ, and values that are not finite."""

import pytest
import torch
import torch.distributed

from helpers import dist
from helpers.numerics import make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.replicas import checksum, faults
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

ALONE = Peers(None, WireBytes())


def bits(x: torch.Tensor) -> torch.Tensor:
    """A tensor's own memory, by bytes."""
    return (x.payload if isinstance(x, ScalingTensor) else x).view(-1).view(torch.uint8)


def tensors() -> dict[str, torch.Tensor]:
    x = make("normal", (3, 101))
    scaled = {f"scaled_{fmt}": ScalingTensor.quantize(x, fmt) for fmt in (E4M3, E5M2, FP16)}
    return {"fp32": x, "bf16": x.bfloat16(), "fp16": x.half(), "number": torch.ones(()), "none": torch.ones(0), **scaled}


@pytest.mark.parametrize("name", [name for name in tensors() if name != "none"])
def test_every_flipped_bit_changes_the_checksum(name):
    x = tensors()[name]
    before = checksum(x)
    assert before.equal(checksum(tensors()[name]))
    for place in {0, 1, len(bits(x)) // 2, len(bits(x)) - 1} & set(range(len(bits(x)))):
        for bit in range(8):
            bits(x)[place] ^= 1 << bit
            assert checksum(x) != before
            bits(x)[place] ^= 1 << bit
    assert checksum(x) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_copy_alone_is_only_finite_or_not(bad):
    weights = tensors()
    assert faults(weights, ALONE) == faults({}, ALONE) == []
    weights["fp16"][1, 2] = bad
    weights["scaled_fp8-e5m2"].payload[0, 0] = torch.tensor(bad).to(E5M2.dtype)
    assert faults(weights, ALONE) == ["fp16 holds NaN or infinity on rank 0", "scaled_fp8-e5m2 holds NaN or infinity on rank 0"]


def looked_at() -> list[list[str]]:
    peers, rank = Peers(torch.distributed.group.WORLD, WireBytes()), torch.distributed.get_rank()
    weights = tensors()
    found = [faults(weights, peers)]
    if rank == 1:
        bits(weights["scaled_fp8-e4m3"])[7] ^= 1
        weights["fp16"][0, 0] = float("inf")
    found.append(faults(weights, peers))
    pair = Peers(torch.distributed.new_group([0, 1]), WireBytes()) if rank < 2 else torch.distributed.new_group([0, 1]) and ALONE
    return [*found, faults(weights, pair), sorted(peers.sent.rows())]


@pytest.mark.promise("Optimizer states", "Differing data-parallel copies of a weight stop the run with rank and tensor named.")
def test_the_rank_and_the_tensor_are_named_on_every_rank():
    """Three ranks know who differs; two know that they differ."""
    first, second, third = dist.run(looked_at, 3)
    infinite = "fp16 holds NaN or infinity on rank 1"
    named = ["fp16 differs on rank 1 from the other 2 copies", infinite, "scaled_fp8-e4m3 differs on rank 1 from the other 2 copies"]
    between = ["fp16 differs between rank 0 and rank 1", infinite, "scaled_fp8-e4m3 differs between rank 0 and rank 1"]
    assert first[:2] == second[:2] == third[:2] == [[], named]
    assert first[2] == second[2] == between
    assert third[2] == []
