"""What initialize promises of layers, gradients and saved states holds after load, copy, pickle, save and a second call, on one process
and on two. The ranks run all causes in one launch."""

import copy
import pickle
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import msamp
from helpers import dist
from helpers.carried_over import COLLECTIVE, WAYS, Pair, begin, carried, loss_of, train, written
from helpers.choices import each_once
from helpers.numerics import make
from msamp.numerics import recipe
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor, fp32_values

pytestmark = [
    pytest.mark.filterwarnings("ignore:less than half"),
    pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm"),
]


# ----------------------------------------------------------------------------------------------- weights that are computed


# ------------------------------------------------------------------------------------------------------------- GradScaler


def under_a_scaler(pair: Pair, scaler: torch.amp.GradScaler, steps: range, bad: int | None = None) -> list[float]:
    """Losses; in step `bad` the last rank overflows."""
    model, optimizer = pair
    losses = []
    last = not torch.distributed.is_initialized() or torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == bad and last else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


@each_once(level=["O1", "O3"], way=WAYS)
def test_grad_scaler_continues_after_a_skipped_step_each_way(level, way):
    """A run whose last step before the way was skipped continues like one that was not carried over."""
    after = {}
    for each in (None, way):
        pair, scaler = begin(level), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        under_a_scaler(pair, scaler, range(3), bad=2)
        if each is not None:
            states = written(scaler.state_dict())
            pair, scaler = carried(each, pair, level), torch.amp.GradScaler("cpu")
            scaler.load_state_dict(states)
        assert scaler.get_scale() == 1024.0  # doubled after two steps, halved by the third
        after[each] = under_a_scaler(pair, scaler, range(3, 6), bad=4)
        assert pair[1].skipped_steps == (2 if each in (None, "load", "copy", "pickle") else 1)
        assert scaler.get_scale() == 512.0
    assert after[way] == (pytest.approx(after[None], rel=0.01) if way == "second call" else after[None])


# ---------------------------------------------------------------------------------------------------------- floats are floats


def assert_floats_are_floats(pair: Pair) -> None:
    """Conversions asked for by name are plain, and an average in them moves as one of an FP32 model."""
    model, optimizer = pair
    state = model.state_dict()
    for name, p in model.named_parameters():
        for x in (
            p.detach().clone().float(),
            p.detach().double(),
            p.to(torch.float32, copy=True),
            state[name].clone().float(),
            p.data.half(),
        ):
            assert type(x) is torch.Tensor
    shadow = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    want = {name: x.double() for name, x in shadow.items()}
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach().float(), 1e-3)
            want[name].lerp_(p.detach().double(), 1e-3)
    assert all(torch.allclose(shadow[name].double(), want[name], rtol=1e-5, atol=1e-9) for name in want)
    kept = {name: x.clone() for name, x in model.state_dict().items()}  # in their formats: a snapshot is restored bit for bit
    before = [fp32_values(p).clone() for p in model.parameters()]
    train(model, optimizer, range(3, 4))
    model.load_state_dict(kept)
    assert all(fp32_values(p).equal(x) for p, x in zip(model.parameters(), before, strict=True))


@each_once(level=["O1", "O3"], way=WAYS)
def test_floats_are_floats_each_way(level, way):
    pair = begin(level)
    train(*pair, range(2))
    assert_floats_are_floats(carried(way, pair, level))


# ----------------------------------------------------------------------------------------------------- gradients are tensors


def assert_gradients_are_tensors(model: nn.Module, plain: list[torch.Tensor]) -> None:
    gs = [p.grad for p in model.parameters()]
    assert all(g.dtype == p.dtype and g.shape == p.shape for g, p in zip(gs, model.parameters(), strict=True))
    for g, want in zip(gs, plain, strict=True):
        assert torch.equal(torch.cat([g.view(-1), g.flatten()]), torch.cat([want.view(-1)] * 2))
        assert torch.sgn(g).equal(torch.sgn(want))
        assert (g > 0).equal(want > 0)
        assert not torch.isnan(g).any()
        assert np.array_equal(g.numpy(), want.numpy())
    norms = torch.stack(torch._foreach_norm(gs))
    assert torch.allclose(norms, torch.stack([want.norm() for want in plain]), rtol=1e-3)


def values(g: torch.Tensor) -> torch.Tensor:
    return g.dequantize() if isinstance(g, FP8Gradient | ScalingTensor) else g.clone()


@each_once(level=["O1", "O3"], way=WAYS)
def test_gradients_are_tensors_each_way(level, way):
    """Gradients that exist when the pair is carried over, where they are, and those of the next backward."""
    pair = begin(level)
    train(*pair, range(2))
    pair[1].zero_grad()
    loss_of(pair[0], 2).backward()
    before = [values(p.grad) for p in pair[0].parameters()]
    model, optimizer = carried(way, pair, level)
    if way in ("copy", "pickle"):  # as torch: a Parameter is copied without its gradient
        assert all(p.grad is None for p in model.parameters())
    elif way != "save":
        assert_gradients_are_tensors(model, before)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    assert isinstance(model[0].weight.grad, FP8Gradient)
    assert_gradients_are_tensors(model, [values(p.grad) for p in model.parameters()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(norm) > 1e-3
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(1e-3, rel=0.02)


# -------------------------------------------------------------------------------------------------------------- saved states


# ---------------------------------------------------------------------------------------------------------- what stays in 16 bits


class Experts(nn.Module):
    """Experts as transformers 5 has them: one 3-D weight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(make("normal", (4, 32, 64)) * 0.1)
        self.down_proj = nn.Parameter(make("normal", (4, 64, 32)) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bf,efo->bo", torch.einsum("bi,eif->bf", x, self.gate_up_proj).relu(), self.down_proj)


def assert_refuses_second_derivatives(model: nn.Module, first: str) -> None:
    x = make("normal", (4, 32)).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"{re.escape(first)} was called under a .*exclude_names"):
        torch.func.vmap(model)(x.detach())


# ------------------------------------------------------------------------------------------------------------- two processes


def everything() -> nn.Module:
    """A computed weight, a layer under two names, experts, and a last layer."""
    torch.manual_seed(0)
    pruned, layer = nn.Linear(32, 32), nn.Linear(32, 32)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    return nn.Sequential(pruned, layer, nn.Tanh(), layer, Experts(), nn.Linear(32, 32))


def on_two_processes() -> dict[str, Any]:
    """Losses by way, and what GradScaler is told under ZeRO."""
    found: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for way in COLLECTIVE:
        pair, scaler = begin("O2", everything(), zero=False), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        lines = str(msamp.survey(pair[0]))
        under_a_scaler(pair, scaler, range(2), bad=1)
        pair = model, optimizer = carried(way, pair, "O2", everything, zero=False)
        fresh = torch.amp.GradScaler("cpu")
        fresh.load_state_dict(written(scaler.state_dict()))
        torch.set_default_dtype(torch.float64)
        try:
            found[way] = under_a_scaler(pair, fresh, range(2, 4), bad=3)
        finally:
            torch.set_default_dtype(torch.float32)
        assert fresh.get_scale() == 256.0  # halved twice
        assert str(msamp.survey(model)) == lines
        optimizer.zero_grad()
        loss_of(model, 4).backward()
        assert_gradients_are_tensors(model, [values(p.grad) for p in model.parameters()])
        optimizer.step()
        assert_floats_are_floats((model, optimizer))
        assert_refuses_second_derivatives(model, "1.weight")
        plain = msamp.plain_state_dict(model, optimizer)
        assert list(plain) == list(everything().state_dict())
        everything().load_state_dict(plain, strict=True)
        other = msamp.convert(everything(), recipe.O2.with_gemm(recipe.GEMMS["tensorwise"]))
        other.load_state_dict(written(model.state_dict()))
        assert torch.allclose(other[1].weight.dequantize(), model[1].weight.dequantize(), rtol=0.07, atol=0.01)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="cannot be copied or pickled"):
            duplicate(optimizer)
    under_a_scaler(begin("O3"), torch.amp.GradScaler("cpu"), range(2), bad=1)  # under ZeRO
    return found


@pytest.mark.promise("Conversion", "What it keeps is kept after load, copy, pickle, save and a second call, on one process and on two.")
def test_so_does_each_cause_on_two_processes():
    first, second = dist.run(on_two_processes, 2, timeout=280)
    assert first == second
    assert first["load"] == first["save"]
    assert first["second call"] == pytest.approx(first["load"], rel=0.01)
