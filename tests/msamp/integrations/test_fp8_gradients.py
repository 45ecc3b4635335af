"""FP8 gradients in a loop of one's own on one process: which recipes have them, and what a loop does to gradients."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.mlp_loop import adamw, batches, mlp, train
from helpers.numerics import bytes_of, codes, through_a_file
from msamp.numerics.formats import E4M3
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor

LEVELS = ("O1", "O2", "O3")
every_level = pytest.mark.parametrize("level", LEVELS)
pytestmark = pytest.mark.filterwarnings("ignore:less than half")


def started(level: str = "O2", dtype=torch.bfloat16, **settings):
    return msamp.initialize(model := mlp().to(dtype), adamw(model), level, **settings)


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    ((x, y),) = batches(1, seed=seed)
    return (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()


def backward(model: nn.Module, seed: int = 1) -> None:
    loss_of(model, seed).backward()


def steps(model: nn.Module, optimizer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def narrow(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if isinstance(p.grad, FP8Gradient) and isinstance(p.grad.held, ScalingTensor)]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return bytes_of(p.detach() for p in model.parameters())


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert all(a.equal(b) for a, b in zip(weights(model), weights(other), strict=True))


MATRICES = ["0.weight", "3.weight", "5.weight"]


@pytest.mark.promise("Recipes", "At O1 to O3 `p.grad` of a linear weight stores E4M3 and one scale after a backward on one process.")
@every_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_linear_weights_are_e4m3_in_the_weight_s_dtype(level, dtype):
    model, _ = started(level, dtype)
    backward(model)
    assert narrow(model) == MATRICES
    for p in model.parameters():
        assert p.grad.dtype == dtype
        if isinstance(p.grad, FP8Gradient):
            assert p.grad.held.payload.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grad_format": "e4m3"}, r"grad_format is 'e4m3'; it must be one of fp32, bf16, fp16, fp8-e4m3, fp8-e5m2"),
        ({"grad_format": "bf16", "recipe": "bf16"}, r"recipe 'bf16' has no FP8 layer; drop it, or take a recipe with FP8 layers"),
    ],
    ids=str,
)
def test_a_format_that_is_none_is_refused_before_anything_changes(settings, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        msamp.initialize(model, adamw(model), **settings)
    assert type(model[0]) is nn.Linear


# ------------------------------------------------------------------------------------------------------------- same numbers


@every_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_has_the_bits_of_one_that_casts_in_the_step(level, dtype):
    """`no_sync` leaves gradients to the step, as every backward did before."""
    results = []
    for late in (False, True):
        model, optimizer = started(level, dtype, clip_grad=0.1)
        for step in range(6):
            optimizer.zero_grad()
            with optimizer.no_sync() if late else contextlib.nullcontext():
                backward(model, step)
            assert bool(narrow(model)) != late
            optimizer.step()
        results.append((weights(model), optimizer.grad_norm))
    assert all(a.equal(b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.nightly(3)), "O2", "O3"])
def test_losses_follow_those_of_bf16_gradients(level):
    first, last = (train(*started(level, torch.float32, **settings), 40) for settings in ({}, {"grad_format": "bf16"}))
    assert last[-10:].mean() < 0.5 * last[0]
    assert first[-10:].mean() == pytest.approx(last[-10:].mean().item(), rel=0.03)


def test_micro_batches_under_no_sync_are_rounded_once():
    model, optimizer = started()
    for seed in range(4):
        with optimizer.no_sync() if seed < 3 else contextlib.nullcontext():
            backward(model, seed)
    reference, _ = started(grad_format="bf16")
    for seed in range(4):
        backward(reference, seed)
    for name in MATRICES:
        got, want = model.get_parameter(name).grad, ScalingTensor.quantize(reference.get_parameter(name).grad, E4M3)
        assert codes(got.held.payload).equal(codes(want.payload))


@pytest.mark.promise("Recipes", "A second backward before `zero_grad` accumulates in the weight's dtype, not in FP8.")
def test_micro_batches_without_no_sync_accumulate_in_bf16():
    """Only the first is rounded to E4M3. Sums in E4M3 would lose what is below half a code of the sum."""
    model, optimizer = started()
    reference, _ = started(grad_format="bf16")
    for seed in range(8):
        backward(model, seed)
        backward(reference, seed)
        assert (narrow(model) == MATRICES) == (seed == 0)
    for name in MATRICES:
        got, want = model.get_parameter(name).grad, reference.get_parameter(name).grad
        assert (got.dequantize().float() - want.float()).norm() < 0.02 * want.float().norm()
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    assert narrow(model) == MATRICES


# ---------------------------------------------------------------------------------------------------- what loops do to them


def test_clipping_by_torch_and_by_msamp_folds_into_the_scale():
    norms = []
    for clip in (nn.utils.clip_grad_norm_, msamp.clip_grad_norm_, lambda p, n: nn.utils.clip_grad_norm_(p, n, foreach=True)):
        model, optimizer = started(dtype=torch.float32)
        backward(model)
        payloads = {name: codes(model.get_parameter(name).grad.held.payload) for name in MATRICES}
        norms.append(float(clip(model.parameters(), 1e-2)))
        assert narrow(model) == MATRICES
        assert all(codes(model.get_parameter(name).grad.held.payload).equal(payload) for name, payload in payloads.items())
        assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(1e-2, rel=1e-3)
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(1e-2, rel=1e-3)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- copies, load, move


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), through_a_file])
def test_a_copy_casts_too_and_trains_on_bit_for_bit(how):
    model, optimizer = started()
    steps(model, optimizer, 2)
    other, second = how((model, optimizer))
    for pair in ((model, optimizer), (other, second)):
        steps(*pair, 2, first=2)
        assert narrow(pair[0]) == MATRICES
    assert_same(model, other)


# ---------------------------------------------------------------------------------------------------------- several processes
