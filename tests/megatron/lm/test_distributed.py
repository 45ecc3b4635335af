"""Gradient synchronisation: formats, accumulation, odd parameters, and averages over two ranks."""

import gc
import weakref
from collections.abc import Iterable

import dist
import pytest
import torch
from torch import Tensor, nn

from megatron.lm import distributed
from megatron.lm.distributed import GradSync
from msamp.nn.linear import FP8Linear
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.recipe import O2
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW


def vector(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (4, 8)) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def give(p: nn.Parameter, gradient: Tensor) -> None:
    """One backward that leaves `gradient` in `p`."""
    (p * gradient.to(p.dtype)).sum().backward()


def values(g: Tensor) -> Tensor:
    return g.dequantize(torch.float32) if isinstance(g, ScalingTensor) else g.float()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16])
def test_one_micro_batch_is_quantised_as_it_appears(fmt: Format):
    p = parameter()
    sync = GradSync({p: fmt}, None, 1)
    g = vector(0, 4, 8).bfloat16()
    give(p, g)
    assert p.grad is None
    assert torch.equal(p.main_grad, ScalingTensor.quantize(g, fmt))  # before finish(): it does not wait for the step's end
    before = p.main_grad
    sync.finish()
    assert p.main_grad is before
    assert p.main_grad.format is fmt
    sync.clear()
    assert p.main_grad is None


def test_of_an_fp8_layer_only_main_grad_is_left():
    layer = FP8Linear(32, 32, recipe=O2, dtype=torch.bfloat16)
    sync = GradSync({layer.weight: E4M3, layer.bias: FP32}, None, 1)
    layer(vector(0, 4, 32).bfloat16()).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert layer.weight.main_grad.format is E4M3
    assert layer.bias.main_grad.dtype is torch.float32
    assert torch.equal(layer.bias.main_grad, torch.full((32,), 4.0))
    sync.clear()
    assert layer.weight.main_grad is None


def test_micro_batches_accumulate_in_bf16_and_are_quantised_once():
    p = parameter()
    sync = GradSync({p: E4M3}, None, 3)
    expected = torch.zeros(4, 8, dtype=torch.bfloat16)
    for seed in range(3):
        g = vector(seed, 4, 8).bfloat16()
        give(p, g)
        expected += g
        assert p.grad is None
        assert p.main_grad.dtype is torch.bfloat16
        assert torch.equal(p.main_grad, expected)
    sync.finish()
    assert torch.equal(p.main_grad, ScalingTensor.quantize(expected, E4M3))
    assert p.main_grad.dtype is torch.bfloat16
    sync.clear()
    give(p, g)  # nothing of the last step is left
    assert torch.equal(p.main_grad, g)


@pytest.mark.parametrize("fmt", [FP32, BF16])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_plain_formats_accumulate_in_themselves(fmt: Format, micro_batches: int):
    p = parameter()
    sync = GradSync({p: fmt}, None, micro_batches)
    expected = torch.zeros(4, 8, dtype=fmt.dtype)
    for seed in range(micro_batches):
        g = vector(seed, 4, 8).bfloat16()
        give(p, g)
        expected += g
    sync.finish()
    assert p.main_grad.dtype is fmt.dtype
    assert torch.equal(p.main_grad, expected)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_tied_weight_gets_the_sum_of_both_uses(micro_batches: int):
    embedding = nn.Embedding(8, 4, dtype=torch.float32)
    sync = GradSync({embedding.weight: FP32}, None, micro_batches)
    ids = torch.tensor([1, 5, 5])
    separate = [w.detach().clone().requires_grad_() for w in (embedding.weight, embedding.weight)]
    for _ in range(micro_batches):
        (nn.functional.linear(embedding(ids), embedding.weight)).square().sum().backward()
        nn.functional.linear(nn.functional.embedding(ids, separate[0]), separate[1]).square().sum().backward()
    sync.finish()
    torch.testing.assert_close(embedding.weight.main_grad, separate[0].grad + separate[1].grad)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_parameter_without_gradient_is_left_out_of_the_step(micro_batches: int):
    used, unused = parameter(), parameter()
    sync = GradSync({used: E4M3, unused: E4M3}, None, micro_batches)
    optimizer = FP8AdamW([used, unused])
    give(used, vector(0, 4, 8))
    sync.finish()
    optimizer.step()
    assert unused.main_grad is None
    assert not optimizer.state.get(unused)
    assert bool(used.any())
    assert not bool(unused.any())


def test_a_frozen_parameter_is_left_alone():
    used, frozen = parameter(), nn.Parameter(torch.ones(4, 8), requires_grad=False)
    sync = GradSync({used: E4M3, frozen: E4M3}, None, 1)
    optimizer = FP8AdamW([used, frozen])
    give(used, vector(0, 4, 8))
    sync.finish()
    optimizer.step()
    assert torch.equal(frozen, torch.ones(4, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", [E4M3, BF16, FP32])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_not_finite_stays_visible(bad: float, fmt: Format, micro_batches: int):
    p = parameter()
    sync = GradSync({p: fmt}, None, micro_batches)
    for _ in range(micro_batches):
        p.register_hook(lambda g: g.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(bad, dtype=g.dtype)))
        give(p, vector(0, 4, 8))
    sync.finish()
    assert not bool(values(p.main_grad).isfinite().all())
    before = p.detach().clone()
    optimizer = FP8AdamW([p])
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(p, before)


def test_a_synchroniser_dies_with_its_last_reference():
    """Hooks hang in autograd's graph, out of the collector's sight: they must not keep model and gradients alive."""
    p = parameter()
    sync = weakref.ref(GradSync({p: E4M3}, None, 1))
    gc.collect()
    assert sync() is None
    give(p, vector(0, 4, 8))
    assert p.grad is not None


def test_buckets_hold_at_most_their_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "BUCKET", 10)
    sizes = [3, 4, 3, 1, 25, 2, 9]
    buckets = list(distributed._buckets([nn.Parameter(torch.zeros(size)) for size in sizes]))
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[3, 4, 3], [1], [25], [2], [9]]
    assert list(distributed._buckets([])) == []


# Two ranks. One spawn serves all that follows.

FORMATS = {"fp32": FP32, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "fp16": FP16}


def gradients_of(rank: int, micro_batch: int) -> dict[str, Tensor]:
    """Different on every rank and micro-batch, and of different magnitudes between the ranks."""
    return {name: (10.0**rank * vector(100 * rank + 10 * micro_batch + i, 4, 8)).bfloat16() for i, name in enumerate(FORMATS)}


def backward(params: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    for name, p in params.items():
        give(p, gradients[name])


def averaged(rank: int, micro_batches: int) -> dict[str, Tensor]:
    params = {name: parameter() for name in FORMATS}
    sync = GradSync({params[name]: fmt for name, fmt in FORMATS.items()}, torch.distributed.group.WORLD, micro_batches)
    for i in range(micro_batches):
        backward(params, gradients_of(rank, i))
        assert all(p.grad is None for p in params.values())
    sync.finish()
    assert all(params[name].main_grad.format is fmt for name, fmt in FORMATS.items() if fmt.scaled)
    return {name: p.main_grad.detach() for name, p in params.items()}


def skipped(rank: int, bad_rank: int | None) -> tuple[int, Tensor]:
    """Skipped steps and weights after a step whose gradient holds a NaN on one rank, in one tensor."""
    params = {name: parameter() for name in FORMATS}
    sync = GradSync({params[name]: fmt for name, fmt in FORMATS.items()}, torch.distributed.group.WORLD, 1)
    optimizer = FP8AdamW(params.values())
    gradients = gradients_of(rank, 0)
    if rank == bad_rank:
        gradients["e4m3"][0, 0] = float("nan")
    backward(params, gradients)
    sync.finish()
    optimizer.step()
    return optimizer.skipped_steps, torch.cat([p.detach().flatten() for p in params.values()])


def two_ranks() -> dict:
    rank = torch.distributed.get_rank()
    return {
        "averages": {micro_batches: averaged(rank, micro_batches) for micro_batches in (1, 3)},
        "skipped": {bad: skipped(rank, bad) for bad in (None, 0, 1)},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return dist.run(two_ranks, 2)


def mean(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.float() for t in tensors]).mean(0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", list(FORMATS))
def test_the_average_is_that_of_both_ranks(ranks: list[dict], name: str, micro_batches: int):
    first, second = (rank["averages"][micro_batches][name] for rank in ranks)
    assert torch.equal(first, second)
    fmt = FORMATS[name]
    sums = [torch.zeros(4, 8, dtype=torch.float32 if fmt is FP32 else torch.bfloat16) for _ in range(2)]
    for rank, total in enumerate(sums):
        for i in range(micro_batches):
            total += gradients_of(rank, i)[name]
    expected = mean(sums)
    if fmt is FP32:
        assert torch.equal(first, expected)
    elif fmt is BF16:
        assert torch.equal(first, expected.bfloat16())
    else:
        wanted = ScalingTensor.quantize(expected, fmt)
        assert torch.equal(first.scale_inv, wanted.scale_inv)
        # Rounded to BF16 on the way: half a unit of its last place may come on top of half a unit of the format's.
        step = 2.0**-fmt.mantissa_bits / 2 + 2.0**-8
        smallest = float(fmt.smallest * wanted.scale_inv) / 2
        torch.testing.assert_close(values(first), expected, rtol=step, atol=smallest)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_nan_of_one_rank_skips_the_step_on_both(ranks: list[dict], bad_rank: int):
    for rank in ranks:
        count, weights = rank["skipped"][bad_rank]
        assert count == 1
        assert not bool(weights.any())


def test_without_a_nan_no_step_is_skipped(ranks: list[dict]):
    (first, weights), (second, other) = (rank["skipped"][None] for rank in ranks)
    assert (first, second) == (0, 0)
    assert bool(weights.any())
    assert torch.equal(weights, other)
