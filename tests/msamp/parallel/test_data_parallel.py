"""A synchroniser for a model: its buckets, and networks that train in their loop with and without ZeRO."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.numerics import bits
from msamp.nn.convert import convert
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.formats import BF16, E4M3, FP32
from msamp.numerics.recipe import FP32_STATES, by_name
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.parallel.data_parallel import BUCKET_ELEMENTS, grad_sync
from msamp.parallel.greedy_zero import ZeRO

LEVELS = ("fp32", "fp16-amp", "bf16", "O1", "O2", "O3")
Bits = dict[str, torch.Tensor]


def ranks() -> torch.distributed.ProcessGroup | None:
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


def flat(tensors: dict[str, torch.Tensor]) -> Bits:
    """The bytes of tensors, copied."""
    parts = {}
    for name, x in tensors.items():
        both = {name: x.payload, f"{name} scale_inv": x.scale_inv} if isinstance(x, ScalingTensor) else {name: x}
        parts |= {key: bits(part).clone() for key, part in both.items()}
    return parts


# ------------------------------------------------------------------------------------------------------------------ networks


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 48), nn.Linear(48, 65), nn.GELU(), nn.Linear(65, 33), nn.LayerNorm(33), nn.Linear(33, 16)]
    return nn.Sequential(*layers).to(device)


def train(level: str, zero: bool, device: str = "cpu", micro_batches: int = 1, steps: int = 5, **options: Any) -> dict[str, Any]:
    """Steps with forwards between them.

    Returns:
        losses: of this rank; at once: the weights in `model.state_dict()` right after the last step; now: those at rest;
        states: of the optimizer (on rank 0).
    """
    recipe, group = by_name(level), ranks()
    model = convert(network(device), recipe)
    low = [p for p in model.parameters() if isinstance(p, ScalingTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, ScalingTensor)]
    formats = {**dict.fromkeys(low, recipe.states.grad), **dict.fromkeys(rest, FP32)}
    sync = grad_sync(model, formats, group, bucket_elements=1500, shard=zero, **options)
    groups = [g for g in ({"params": low, "formats": recipe.states}, {"params": rest, "formats": FP32_STATES}) if g["params"]]
    settings: dict[str, Any] = {"lr": 0.01, "clip_grad": 0.5}
    optimizer = LowPrecisionOptimizer(groups, shard=ZeRO(sync) if zero else None, **settings)
    scaling, names = ScalingState(model), {name for name, _ in model.named_parameters()}
    result: dict[str, Any] = {"losses": []}
    for step in range(steps):
        loss = torch.zeros((), device=device)
        for micro in range(micro_batches):
            draw = torch.Generator().manual_seed(100 * (step % 2) + 10 * micro + sync.peers.rank)
            tokens, target = torch.randint(50, (16,), generator=draw).to(device), torch.randn(16, 16, generator=draw).to(device)
            with sync.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                part = (model(tokens) - target).square().mean() / micro_batches
                part.backward()
            loss += part.detach()
        sync.finish()
        optimizer.step()
        if step == steps - 1:
            result["at once"] = flat({k: v for k, v in model.state_dict().items() if k in names})
        sync.clear()
        scaling.roll(group)
        result["losses"].append(float(loss))
    if device == "cuda":
        torch.cuda.synchronize()
    result["now"] = flat({k: v for k, v in model.state_dict().items() if k in names})
    return {**result, "states": flat({f"{i} {k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()})}


def same(a: Bits, b: Bits) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def check_on_and_off(on: list[dict[str, Any]], off: list[dict[str, Any]]) -> None:
    """What each rank returned from `train` with and without ZeRO."""
    for mine, theirs in zip(on, off, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["losses"][-1] < mine["losses"][0]
        assert same(mine["now"], theirs["now"])
        assert same(mine["at once"], mine["now"])
        assert same(mine["now"], on[0]["now"])
    assert on[0]["states"]
    assert same(on[0]["states"], off[0]["states"])


def each_level(device: str, micro_batches: int) -> dict[tuple[str, bool], dict[str, Any]]:
    return {(level, zero): train(level, zero, device, micro_batches) for level in LEVELS for zero in (True, False)}


def check_levels(seen: list[dict[tuple[str, bool], dict[str, Any]]]) -> None:
    for level in LEVELS:
        check_on_and_off([rank[level, True] for rank in seen], [rank[level, False] for rank in seen])


@pytest.mark.nightly
def test_two_processes_train_the_same_with_and_without_zero():
    check_levels(dist.run(each_level, 2, "cpu", 2))


@pytest.mark.multi_gpu
def test_two_gpus_with_overlap_train_the_same_with_and_without_zero():
    check_levels(dist.on_gpus(each_level, 2, "cuda", 2))


# ------------------------------------------------------------------------------------------------------------------- buckets


def test_buckets_fill_in_the_order_of_backward_by_format():
    model = network("cpu")
    formats = {p: E4M3 if p.dim() == 2 and name != "0.weight" else FP32 for name, p in model.named_parameters()}
    formats[model[0].weight] = BF16
    sync = grad_sync(model, formats, bucket_elements=2700)
    assert [(bucket.format, bucket.names) for bucket in sync.buckets] == [
        (E4M3, ["5.weight", "3.weight"]),
        (FP32, ["5.bias", "4.bias", "4.weight", "3.bias", "1.bias"]),
        (E4M3, ["1.weight"]),  # larger than a bucket: one of its own
        (BF16, ["0.weight"]),
    ]
    assert [bucket.sizes for bucket in sync.buckets] == [[33 * 16 + 65 * 33], [16 + 33 + 33 + 33 + 65], [48 * 65], [50 * 48]]
    assert not any(bucket.cut for bucket in sync.buckets)


def test_a_bucket_holds_everything_by_default_and_frozen_parameters_are_left_out():
    model = network("cpu")
    model[1].weight.requires_grad_(False)
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32))
    (bucket,) = sync.buckets
    assert sum(bucket.sizes) < BUCKET_ELEMENTS
    assert "1.weight" not in bucket.names
    assert sync.bucket_of(model[0].weight) is bucket
    assert sync.owned(model[1].weight) == []


def buckets_of_this_rank() -> list[tuple[list[int], list[tuple[str, int, int, int]], float]]:
    """Sizes, pieces and the average that this rank ends with, on a model whose gradient is its rank plus one."""
    model = nn.Sequential(nn.Linear(30, 21), nn.Linear(21, 5))
    sync = grad_sync(model, dict.fromkeys(model.parameters(), FP32), ranks(), bucket_elements=700)
    for p in reversed(list(model.parameters())):
        p.grad = torch.full_like(p, sync.peers.rank + 1.0)
        sync.take(p)
    sync.finish()
    averages = {float(x) for p in model.parameters() for x in (p.main_grad.min(), p.main_grad.max())}
    (average,) = averages
    return [(b.sizes, [(b.names[s.index], s.row, s.rows, s.owner) for s in b.pieces], average) for b in sync.buckets]


def test_every_bucket_is_spread_over_the_ranks():
    seen = dist.run(buckets_of_this_rank, 2)
    assert seen[0] == seen[1]
    for sizes, pieces, average in seen[0]:
        assert average == 1.5
        assert max(sizes) <= 1.25 * sum(sizes) / 2
        assert [piece[3] for piece in pieces] == sorted(piece[3] for piece in pieces)
    assert any(rows < 21 for _, pieces, _ in seen[0] for name, _, rows, _ in pieces if name == "0.weight"), "the large one is cut"
