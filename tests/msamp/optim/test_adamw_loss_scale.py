"""AdamW with a loss scale: FP16 weights beside FP32 masters, gradients unscaled with the clipping, steps skipped at an overflow."""

import copy

import pytest
import torch
from torch import nn

from helpers.numerics import make
from msamp.fp16.scaler import LossScaler
from msamp.numerics.recipe import FP32_STATES, O2
from msamp.optim.optimizer import LowPrecisionOptimizer

SHAPES = [(33, 17), (5,), (64, 48)]


def pair(scaler: LossScaler | None, device, clip_grad: float | None = 0.5) -> tuple[LowPrecisionOptimizer, LowPrecisionOptimizer]:
    """FP16 weights with a loss scale, and FP32 weights of the same values without."""
    values = [make("normal", s, seed=i, device=device).half() for i, s in enumerate(SHAPES)]
    narrow, wide = ([nn.Parameter(x.to(dtype)) for x in values] for dtype in (torch.float16, torch.float32))
    settings = {"lr": 0.02, "formats": FP32_STATES, "clip_grad": clip_grad}
    return LowPrecisionOptimizer(narrow, loss_scale=scaler, **settings), LowPrecisionOptimizer(wide, **settings)


def params(optimizer: LowPrecisionOptimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("clip_grad", [None, 0.5])
def test_the_masters_are_what_fp32_weights_become(clip_grad, device):
    """Gradients are multiples of a power of two, so that the loss scale leaves every bit of them."""
    scaler = LossScaler(growth_interval=2, in_place=True)
    ours, theirs = pair(scaler, device, clip_grad)
    for step in range(5):
        scale = scaler.scale(torch.device(device)).clone()
        for i, (p, q) in enumerate(zip(params(ours), params(theirs), strict=True)):
            q.grad = (make("normal", p.shape, seed=10 * step + i, device=device) * 2**-12).half().float()
            p.main_grad = q.grad * scale
        ours.step()
        theirs.step()
        assert ours.grad_norm == theirs.grad_norm
        assert ours.grad_amaxes.equal(theirs.grad_amaxes)
    for p, q in zip(params(ours), params(theirs), strict=True):
        assert p.dtype is torch.float16
        assert p.equal(ours.state[p]["master"].half())
        # Clipping and unscaling are one factor, rounded once.
        assert ours.state[p]["master"].equal(q) if clip_grad is None else torch.allclose(ours.state[p]["master"], q, rtol=1e-5, atol=1e-6)
    assert scaler.state_dict()["loss_scale"] == 2.0**18


def test_an_overflow_skips_the_step_and_halves_the_scale(device):
    scaler = LossScaler(init_scale=1024.0, hysteresis=2, in_place=True)
    optimizer, _ = pair(scaler, device)
    memory = scaler.scale(torch.device(device))
    before = [p.detach().clone() for p in params(optimizer)]
    for p in params(optimizer):
        p.grad = torch.full_like(p, 60000.0) * 2  # infinite in FP16
    found = []
    for _ in range(3):
        optimizer.step()
        found.append(float(memory))
    assert found == [1024.0, 512.0, 256.0]
    assert optimizer.skipped_steps == 3
    assert bool(optimizer.skipped())
    assert all(p.equal(q) for p, q in zip(params(optimizer), before, strict=True))
    for p in params(optimizer):
        p.grad = torch.full_like(p, 60000.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(60000.0 / 256 * sum(p.numel() for p in params(optimizer)) ** 0.5, rel=1e-3)
    assert not optimizer.skipped()


def test_copies_keep_the_loss_scale():
    optimizer, _ = pair(LossScaler(8), "cpu")
    assert copy.deepcopy(optimizer).loss_scale.scale(torch.device("cpu")).item() == 8.0


@pytest.mark.parametrize("grouped", [False, True])
def test_plain_fp16_weights_want_an_fp32_master(grouped):
    p, message = nn.Parameter(torch.ones(2, 2).half()), r"torch.float16 and its master fp16; .* requires an fp32 master \(recipe fp16-amp\)"
    with pytest.raises(ValueError, match=message):
        LowPrecisionOptimizer([{"params": [p], "formats": O2.states}] if grouped else [p])
