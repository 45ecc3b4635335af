"""Public bug reports of other FP8 libraries, and other people's loops, each as a program that must come out right here."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import msamp
from helpers.choices import each_once
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


def by_closure(model, optimizer, loss):
    def closure():
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    return optimizer.step(closure)


def by_hand(model, optimizer, loss):
    found = loss()
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(found, params), strict=True):
        p.grad = g
    optimizer.step()
    return found


def by_one_vector(model, optimizer, loss):
    """As projections of several gradients do it (PCGrad)."""
    found = loss()
    params = list(model.parameters())
    flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(found, params)])
    for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = g.view_as(p)
    optimizer.step()
    return found


def with_noise(model, optimizer, loss):
    optimizer.zero_grad()
    found = loss()
    found.backward()
    for p in model.parameters():
        p.grad.add_(make("normal", tuple(p.shape)) * 1e-4).clamp_(-0.1, 0.1)
    optimizer.step()
    return found


def with_penalty(model, optimizer, loss):
    optimizer.zero_grad()
    found = loss()
    found.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p * 1e-3)
    optimizer.step()
    return found


STEPS_OF = {step_of.__name__: step_of for step_of in (by_closure, by_hand, by_one_vector, with_noise, with_penalty)}


@each_once(0.5, name=list(STEPS_OF), recipe=["O1", "O2", "O3"])
def test_other_people_s_steps_train_as_in_fp32(name, recipe):
    step_of = STEPS_OF[name]
    last = []
    for low in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = msamp.initialize(model, optimizer, recipe) if low else (model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(25):
                x = make("normal", (16, 32), step)
                loss = step_of(model, optimizer, lambda model=model, x=x: (model(x) - x * 0.5).square().mean())
        last.append(float(loss.detach()))
    assert last[1] == pytest.approx(last[0], rel=0.02)
