"""Public bug reports of other FP8 libraries, and other people's loops, each as a program that must come out right here."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import msamp
from helpers.numerics import make


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def started(recipe: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def everything(reentrant: bool | None, recipe: str) -> list[torch.Tensor]:
    """Weights and scales after 18 steps, more than a window, with activation checkpointing or without (None)."""
    model, optimizer = started(recipe)
    for step in range(18):
        x = make("normal", (16, 32), step).requires_grad_()
        optimizer.zero_grad()
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        (y - x.detach()).square().mean().backward()
        optimizer.step()
    scales = [module.scaling.history for module in model if hasattr(module, "scaling")]
    return [*(msamp.fp32_values(p).clone() for p in model.parameters()), *(x.clone() for x in scales)]


@pytest.mark.parametrize("recipe", ["O2", "O3"])
def test_activation_checkpointing_changes_no_bit(recipe):
    """Transformer Engine #415 and #1190: it failed, and left the scales of backward behind."""
    want = everything(None, recipe)
    for reentrant in (True, False):
        assert all(a.equal(b) for a, b in zip(everything(reentrant, recipe), want, strict=True))


def test_a_layer_that_does_not_run_keeps_its_scales():
    """Transformer Engine #814: histories rolled by steps in which the layer was not called."""
    model, optimizer = started("O2")
    for step in range(36):
        if step == 18:
            scale = model[2].scaling.scale.clone()
        x = make("normal", (16, 32), step)
        hidden = model[1](model[0](x))
        optimizer.zero_grad()
        (model[4](hidden if step >= 18 else model[3](model[2](hidden))) - x).square().mean().backward()
        optimizer.step()
    assert model[2].scaling.scale.equal(scale)


def test_a_checkpoint_with_larger_weights_meets_no_scale_of_those_before():
    """Transformer Engine #567: FP8 parameters that were loaded were cast by the amaxes of their initialisation."""
    model, optimizer = started("O2")
    for step in range(18):
        x = make("normal", (16, 32), step)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    plain = net()
    plain.load_state_dict({name: v * 16 if v.dim() == 2 else v for name, v in net().state_dict().items()})
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        want = plain(x)
        assert (model(x) - want).norm() < 0.1 * want.norm()
