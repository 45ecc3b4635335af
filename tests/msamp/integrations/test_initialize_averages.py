"""Averages of a converted model: torch's AveragedModel, with buffers and without, and averages that are swapped in."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import msamp
from helpers.choices import each_once
from helpers.numerics import make

LOUD = 64.0
pytestmark = pytest.mark.filterwarnings("ignore:.*stores into fp8-e4m3")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loud: float, steps: int) -> None:
    for step in range(steps):
        x = make("normal", (64, 32), step) * loud
        optimizer.zero_grad()
        (model(x) - x[:, :16]).square().mean().backward()
        optimizer.step()


def averaged(level: str, average, buffers: bool) -> tuple[nn.Module, AveragedModel, AveragedModel]:
    """A model of which the windows are full and then meet inputs 64 times as large; its average, and that of its values in FP32."""
    low, optimizer = msamp.initialize(model := net(), torch.optim.AdamW(model.parameters(), lr=2e-3), level)
    train(low, optimizer, 1.0, 20)
    found = AveragedModel(low, multi_avg_fn=average, use_buffers=buffers)
    exact = AveragedModel(msamp.float_copy(low), multi_avg_fn=average)
    for loud in (1.0, 1.0, LOUD):
        train(low, optimizer, loud, 17)
        found.update_parameters(low)
        exact.update_parameters(low)
    return low, found, exact


def error(model: nn.Module, exact: nn.Module) -> float:
    x = make("normal", (64, 32), 99) * LOUD
    with torch.no_grad():
        want = exact(x)
        return float((model(x) - want).norm() / want.norm())


@pytest.mark.promise("Hosts", "torch's AveragedModel multiplies by the averaged weights, with `use_buffers` too.")
@each_once(1.0, average=["mean", "ema"], buffers=[False, True])
def test_an_average_multiplies_by_the_averaged_weights(average, buffers):
    """Its buffers are means of scales of several moments, and would saturate."""
    low, found, exact = averaged("O2", get_ema_multi_avg_fn(0.9) if average == "ema" else None, buffers)
    assert error(low, exact) > 0.3
    assert error(found, exact) < 0.1
    assert error(copy.deepcopy(found), exact) < 0.1
    for p, q in zip(found.module.parameters(), exact.module.parameters(), strict=True):
        assert torch.allclose(msamp.fp32_values(p), q, rtol=0.02, atol=1e-3)
    if buffers and average == "mean":  # ema writes the weights last, which resets the scales
        scaling = found.module[0].scaling
        assert not torch.allclose(scaling.scale * scaling.scale_inv, torch.ones(2))
    other, _ = msamp.initialize(model := net(), torch.optim.AdamW(model.parameters()), "O2")
    other.load_state_dict(found.module.state_dict())
    assert error(other, exact) < 0.1


def momentum_encoder(recipe: str, kept: str) -> tuple[bool, float, float]:
    """Whether MoCo's line warned, how far the encoder is from the true average, and how far that is from the start."""
    low, optimizer = msamp.initialize(model := net(), torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    encoder = (msamp.float_copy(low) if kept == "float" else copy.deepcopy(low)).requires_grad_(False)
    start = [msamp.fp32_values(p).clone() for p in encoder.parameters()]
    true = [x.clone() for x in start]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            train_one(low, optimizer, step + (100 * torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
            for k, q, t in zip(encoder.parameters(), low.parameters(), true, strict=True):
                k.data = k.data * 0.999 + q.data * 0.001
                t.lerp_(msamp.fp32_values(q), 0.001)
        encoder.load_state_dict(pickle.loads(pickle.dumps(encoder)).state_dict())
    said = any("lost" in str(w.message) and "msamp.float_copy" in str(w.message) for w in caught)
    kept_values = [msamp.fp32_values(p) for p in encoder.parameters()]
    off = sum(float((a - b).norm()) for a, b in zip(kept_values, true, strict=True))
    return said, off, sum(float((a - b).norm()) for a, b in zip(true, start, strict=True))


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = make("normal", (64, 32), seed)
    optimizer.zero_grad()
    (model(x) - x[:, :16]).square().mean().backward()
    optimizer.step()


@pytest.mark.promise("Hosts", "An average or momentum encoder that few bits hold still warns, and one in `msamp.float_copy` follows.")
@pytest.mark.parametrize("recipe", ["O1", "O2", "O3"])
def test_a_momentum_encoder_in_few_bits_warns_and_one_in_a_float_copy_follows(recipe):
    said, off, way = momentum_encoder(recipe, "low")
    assert said
    assert off > 0.3 * way
    said, off, way = momentum_encoder(recipe, "float")
    assert not said
    assert off < 1e-3 * way
