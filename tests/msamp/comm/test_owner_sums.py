"""Micro-batches that add up at the owner: bit for bit what the definition says, on one process and on two, whatever the layout."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import dist
from helpers.choices import each_value
from helpers.numerics import make
from helpers.synced import merged, model_of, stamp, synced
from msamp.comm.bucket_sender import OwnerSums
from msamp.comm.grad_scaling import NOT_FINITE
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import ALL, Format, by_name
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor, fp32_values

SHAPES = ((33,), (3, 5, 7), (), (40, 9))
EVERY = {f"{fmt}_{i}": shape for i, shape in enumerate(SHAPES) for fmt in ALL}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ZeRO": {"shard": True},
    "small buckets": {"shard": True, "bucket_elements": 120},
    "late": {"overlap": False, "bucket_elements": 120},
}
MICRO_BATCHES = 3


def gradient(i: int, rank: int, name: str) -> Tensor | None:
    """Of magnitudes far apart between ranks and micro-batches. Those that end in 2 miss micro-batch 1 on rank 1, those of FP16 the last."""
    place = list(EVERY).index(name)
    if (name.endswith("2") and i == 1 and rank == 1) or (name == "fp16_0" and i == 2):
        return None
    return make("normal", EVERY[name] or (1,), 1000 * rank + 100 * i + place).view(EVERY[name]) * 30.0 ** ((rank + 2 * i + place) % 5 - 2)


def defined(parts: list[list[Tensor | None]], fmt: Format, shape: tuple[int, ...]) -> tuple | None:
    """`parts[i][rank]` -> each micro-batch quantised with the scale that the ranks share, averaged and added up in FP32, rounded once."""
    total = torch.zeros(shape)
    for ranks in parts:
        present = [g for g in ranks if g is not None]
        scale = torch.tensor(1.0)
        if fmt.scaled and present:
            scale = torch.stack([scale_from_amax(g.abs().amax(), fmt.max) for g in present]).amin()
        filled = [torch.zeros(shape) if g is None else g for g in ranks]
        payloads = [(quantize(g, scale, fmt) if fmt.scaled else g.to(fmt.dtype)).float() for g in filled]
        mean = payloads[0]
        for payload in payloads[1:]:
            mean = mean + payload
        total = total + mean / len(ranks) / scale
    return stamp(ScalingTensor.quantize(total, fmt) if fmt.scaled else total.to(fmt.dtype))


def give(model: nn.ParameterDict, i: int, rank: int) -> None:
    found = {name: gradient(i, rank, name) for name in EVERY}
    sum((model[name] * g).sum() for name, g in found.items() if g is not None).backward()


def step(sync: GradSync, model: nn.ParameterDict, rank: int, last_held: bool = False) -> dict[str, Any]:
    """One step of micro-batches; by name the stamps of this rank's averages, by first row."""
    for i in range(MICRO_BATCHES):
        held = i < MICRO_BATCHES - 1 or last_held
        with sync.no_sync() if held else contextlib.nullcontext():
            give(model, i, rank)
    sync.finish()
    found = {}
    for name, p in model.items():
        owned = {piece.row: stamp(piece.grad) for piece in sync.owned(p) if piece.grad is not None}
        found[name] = {0: stamp(p.main_grad)} if p.main_grad is not None else owned
    return found


def one_rank(rank: int, group: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        model = model_of(EVERY)
        sync = synced(model, group, accumulate="owner", **layout)
        first = step(sync, model, rank)
        sync.clear()
        again = step(sync, model, rank, last_held=True)
        sync.clear()
        found[name] = {"first": first, "again": again}
    return found


def ranks_of_two() -> dict[str, Any]:
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    found = one_rank(rank, group)
    found["faulty"] = faulty(rank, group)
    found["sent"] = sent(group)
    found["discarded"] = discarded(rank, group)
    return found


def faulty(rank: int, group: Any) -> dict[str, Any]:
    """A gradient of rank 1 is not finite in the first micro-batch alone."""
    model = model_of({"fp8-e4m3_a": (4, 8), "bf16_b": (4, 8), "fp8-e4m3_c": (4, 8)})
    sync = synced(model, group, accumulate="owner")
    for i in range(2):
        with sync.no_sync() if i == 0 else contextlib.nullcontext():
            g = {name: make("normal", (4, 8), 10 * rank + i) for name in model}
            if rank == 1 and i == 0:
                g["fp8-e4m3_a"][2, 2] = torch.inf
                g["bf16_b"][1, 1] = torch.nan
            sum((model[name] * x).sum() for name, x in g.items()).backward()
    sync.finish()
    blamed = [sync.names[p] for p, told in zip(sync.params, sync.own_proposals.tolist(), strict=True) if told == NOT_FINITE]
    return {"finite": {name: bool(fp32_values(p.main_grad).isfinite().all()) for name, p in model.items()}, "blamed": sorted(blamed)}


def sent(group: Any) -> dict[str, dict[tuple[str, str], int]]:
    """Bytes of a step of three micro-batches."""
    found = {}
    for way in ("owner", "fp32"):
        model = model_of({"fp8-e4m3_a": (64, 64)})
        sync = synced(model, group, accumulate=way, shard=True)
        for i in range(3):
            with sync.no_sync() if i < 2 else contextlib.nullcontext():
                model["fp8-e4m3_a"].sum().backward()
        sync.finish()
        found[way] = sync.sent.take()
    return found


def discarded(rank: int, group: Any) -> bool:
    """After `discard` in the middle of a step the next one is as the first."""
    model = model_of(EVERY)
    sync = synced(model, group, accumulate="owner")
    with sync.no_sync():
        give(model, 0, rank)
        give(model, 1, rank)
    sync.discard()
    return step(sync, model, rank) == one_rank_plain(rank, group)


def one_rank_plain(rank: int, group: Any) -> dict[str, Any]:
    model = model_of(EVERY)
    return step(synced(model, group, accumulate="owner"), model, rank)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return dist.run(ranks_of_two, 2)


@each_value(when=["first", "again"], layout=LAYOUTS, ranks=[1, 2])
def test_the_sum_is_the_defined_one_bit_for_bit(request: pytest.FixtureRequest, ranks: int, layout: str, when: str):
    """`again`: a second step on the same synchroniser, whose micro-batches all came under `no_sync`."""
    found = [rank[layout][when] for rank in (request.getfixturevalue("two") if ranks == 2 else [one_rank(0)])]
    for name, shape in EVERY.items():
        parts = [[gradient(i, rank, name) for rank in range(ranks)] for i in range(MICRO_BATCHES)]
        assert merged(found, name) == defined(parts, by_name(name.split("_")[0]), shape), name


def test_what_is_not_finite_in_one_micro_batch_is_so_in_the_sum_and_blamed_on_its_rank(two: list[dict[str, Any]]):
    for rank in two:
        assert rank["faulty"]["finite"] == {"fp8-e4m3_a": False, "bf16_b": False, "fp8-e4m3_c": True}
    assert [rank["faulty"]["blamed"] for rank in two] == [[], ["bf16_b", "fp8-e4m3_a"]]


def test_gradients_discarded_between_micro_batches_are_gone(two: list[dict[str, Any]]):
    assert [rank["discarded"] for rank in two] == [True, True]


def test_an_exchange_that_does_not_sum_in_fp32_is_refused():
    model = model_of({"fp8-e4m3_a": (4, 8)})
    with pytest.raises(ValueError, match=r"gradient exchange nccl has none; choose exchange 'fp32-sum', or accumulation fp8"):
        synced(model, accumulate="owner", exchange="nccl")


def test_sums_and_proposals_stay_where_they_began():
    """A CUDA graph of a micro-batch finds them there."""
    sync = synced(model_of({"fp8-e4m3_a": (8, 8)}), None, accumulate="owner")
    (bucket,), sums = sync.buckets, OwnerSums()
    sums.add(bucket, torch.ones(64), torch.ones(1), torch.tensor([4.0]))
    before = [t.data_ptr() for t in (sums._sums[bucket], sums._proposals[bucket])]
    for proposal in (2.0, 8.0):
        sums.add(bucket, torch.ones(64), torch.full((1,), 0.5), torch.tensor([proposal]))
    assert [t.data_ptr() for t in (sums._sums[bucket], sums._proposals[bucket])] == before
    total, proposals = sums.take(bucket)
    assert total.tolist() == [5.0] * 64
    assert proposals.tolist() == [2.0]
    assert bucket not in sums
