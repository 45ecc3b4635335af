"""A step that is skipped leaves no trace: not in the scales of the casts, whoever skips it, nor in what the optimizer keeps."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist
from helpers.choices import each_value
from helpers.numerics import same
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT
from msamp.numerics import recipe
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("O1", "O2", "O3", "coat")},
    "O1, tensorwise": ("O1", {"fp8_recipe": "tensorwise"}),
    "O2, tensorwise": ("O2", {"fp8_recipe": "tensorwise"}),
}
every_recipe = pytest.mark.parametrize("name", [name for name in RECIPES if name != "O2, tensorwise"])
WINDOW = 4  # of delayed scaling; the levels' own of 16 steps makes every run four times as long, and is in one case of an outlier
BAD, STEPS = 6, 10  # the window is filled by then
SCALE = 2.0**10

Pair = tuple[nn.Module, Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def made(name: str = "O2", **options: Any) -> Pair:
    chosen, settings = RECIPES[name]
    level = chosen if settings else recipe.by_name(chosen).with_scaling(Delayed(WINDOW))
    return msamp.initialize(model := net(), torch.optim.AdamW(model.parameters(), lr=1e-3), level, **settings, **options)


def short(rule: int | Delayed, name: str = "O2", **options: Any) -> Pair:
    level = recipe.by_name(name).with_scaling(Delayed(rule) if isinstance(rule, int) else rule)
    return msamp.initialize(model := net(), torch.optim.AdamW(model.parameters(), lr=1e-3), level, **options)


def data(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, step: int, bad: bool = False, rank: int = 0) -> torch.Tensor:
    """Of a bad step the gradients overflow, and the amaxes of `grad_output` do not: they are finite and 38 orders too large."""
    x = data(step, rank)
    return (model(x) - x.roll(1, 1)).square().mean() * (1e38 if bad else 1.0)


def train(pair: Pair, steps: Iterable[int], bad: int | None = None, rank: int = 0) -> list[float]:
    model, optimizer = pair
    losses = []
    for step in steps:
        loss = loss_of(model, step, step == bad, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without(steps: Iterable[int], bad: int) -> list[int]:
    return [step for step in steps if step != bad]


def parts(x: Any) -> list[torch.Tensor]:
    return [x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x]


def bits(pair: Pair) -> list[torch.Tensor]:
    """Everything that the next step depends on: weights, histories, scales, `seen`, states of the optimizer."""
    model, optimizer = pair
    states = [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    every = [part for x in [*model.state_dict().values(), *states] for part in parts(x)]
    return [x.detach().reshape(-1).contiguous().view(torch.uint8).clone() for x in every]


def histories(model: nn.Module) -> list[torch.Tensor]:
    return [layer.scaling.history.clone() for layer in (model[0], model[2])]


# ------------------------------------------------------------------------------------------------------------ the optimizer's


@every_recipe
def test_a_run_with_a_skipped_step_is_the_run_that_never_saw_its_batch(name):
    struck, clean = made(name), made(name)
    struck_losses = train(struck, range(STEPS), BAD)
    assert struck[1].skipped_steps == 1
    assert without(struck_losses, struck_losses[BAD]) == train(clean, without(range(STEPS), BAD))
    assert same(bits(struck), bits(clean))


# ----------------------------------------------------------------------------------------------------------- torch's GradScaler


def scaled(pair: Pair, steps: Iterable[int], bad: int | None, clip: bool, rank: int = 0, spoilt: bool = True) -> None:
    """Train under a GradScaler of one scale, put back after it has fallen; `spoilt`: whether this rank has the bad batch."""
    model, optimizer = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, spoilt and step == bad, rank)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (SCALE / 2 if step == bad else SCALE)
        scaler.update(SCALE)


@each_value(clip=[False, True], name=[name for name in RECIPES if name != "O2, tensorwise"])
def test_a_step_that_grad_scaler_skips_leaves_no_trace(name, clip):
    struck, clean = made(name), made(name)
    scaled(struck, range(STEPS), BAD, clip)
    scaled(clean, without(range(STEPS), BAD), None, clip)
    assert struck[1].skipped_steps == 1
    assert same(bits(struck), bits(clean))


def test_grad_scaler_s_scale_is_divided_out_before_the_norm_is_clipped():
    """A power of two changes no bit of a gradient in FP32, so that the run is the run without a scaler."""
    plain, under = made("O1", clip_grad=0.05), made("O1", clip_grad=0.05)
    train(plain, range(3))
    scaled(under, range(3), None, clip=False)
    assert float(under[1].grad_norm) == pytest.approx(float(plain[1].grad_norm), rel=1e-6)
    assert under[1].grad_amaxes.tolist() == pytest.approx(plain[1].grad_amaxes.tolist(), rel=1e-6)
    weights = ([msamp.fp32_values(p) for p in pair[0].parameters()] for pair in (plain, under))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(*weights, strict=True))
    assert under[1].loss_scale is None
    assert not hasattr(under[1], "grad_scale")


# ------------------------------------------------------------------------------------------------------- a loop that skips by itself


def at_the_top(pair: Pair, steps: Iterable[int], bad: int, *, twice: bool = False, **clearing: Any) -> None:
    """zero_grad, forward, backward, step, and `twice` zero_grad once more."""
    model, optimizer = pair
    for step in steps:
        optimizer.zero_grad(**clearing)
        loss_of(model, step, step == bad).backward()
        if step != bad:
            optimizer.step()
        if twice:
            optimizer.zero_grad(**clearing)


def skips_and_clears(pair: Pair, steps: Iterable[int], bad: int, **clearing: Any) -> None:
    """forward, zero_grad, backward, step, with a zero_grad of its own for a bad step."""
    model, optimizer = pair
    for step in steps:
        loss = loss_of(model, step, step == bad)
        optimizer.zero_grad(**clearing)
        loss.backward()
        if step == bad:
            optimizer.zero_grad(**clearing)
            continue
        optimizer.step()


@pytest.mark.parametrize("clearing", [{}, {"set_to_none": False}], ids=str)
@pytest.mark.parametrize("loop", [at_the_top, skips_and_clears, functools.partial(at_the_top, twice=True)])
def test_a_backward_that_no_step_takes_leaves_no_trace(loop, clearing):
    struck, clean = made("O2"), made("O2")
    loop(struck, range(STEPS), BAD, **clearing)
    loop(clean, without(range(STEPS), BAD), -1, **clearing)
    assert struck[1].skipped_steps == 0
    assert same(bits(struck), bits(clean))
    assert struck[0][0].scaling.seen == STEPS - 1


def test_gradients_dropped_in_every_step_do_not_freeze_the_scales():
    """One forward and a backward for each of several losses, as where gradients of tasks are projected: nothing is wrong, and the amaxes
    of the forward and of the first loss are all there are."""
    model, optimizer = made("O2")
    for step in range(40):
        growth = 1.2**step
        x = data(step)
        y = model(growth * x)
        optimizer.zero_grad()
        (100 * growth * y.square().mean()).backward(retain_graph=True)
        kept = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        y.abs().mean().backward()
        for p, g in zip(model.parameters(), kept, strict=True):
            p.grad.add_(g)
        optimizer.step()
        assert model[0].scaling.history[INPUT, -1] == (growth * x).abs().max()
    assert model[2].scaling.history[GRAD_OUTPUT, -1] > 50 * 40 / y.numel()


# ---------------------------------------------------------------------------------------------------------- a finite outlier


# --------------------------------------------------------------------------------------------------------------- several processes


def looks_at_the_norm(pair: Pair, steps: Iterable[int], bad: int | None, rank: int) -> None:
    """A loop that takes no step where the averaged gradients are not finite or too large, on the second rank's account."""
    model, optimizer = pair
    for step in steps:
        loss_of(model, step, rank == 1 and step == bad, rank).backward()
        optimizer.synchronize()
        norm = nn.utils.get_total_norm([msamp.fp32_values(p.grad) for p in model.parameters()])
        if norm < 1e10:
            optimizer.step()
        optimizer.zero_grad()


def on_ranks(name: str) -> dict[str, Any]:
    rank, found, steps, bad = torch.distributed.get_rank(), {}, range(9), 5

    def two(**options: Any) -> tuple[Pair, Pair]:
        return short(3, name, **options), short(3, name, **options)

    for zero in (False, True):
        struck, clean = two(zero=zero)
        train(struck, steps, bad if rank else None, rank)  # on one rank alone
        train(clean, without(steps, bad), None, rank)
        found[f"zero {zero}"] = struck[1].skipped_steps, same(bits(struck), bits(clean))
        struck, clean = two(zero=zero)
        at_the_top(struck, steps, bad)
        at_the_top(clean, without(steps, bad), -1)
        found[f"own loop, zero {zero}"] = struck[1].skipped_steps + 1, same(bits(struck), bits(clean))
    for clip, zero in ((False, False), (True, False), (True, True)):
        struck, clean = two(zero=zero)
        scaled(struck, steps, bad, clip, rank, spoilt=rank == 1)
        scaled(clean, without(steps, bad), None, clip, rank)
        found[f"GradScaler, clip {clip}, zero {zero}"] = struck[1].skipped_steps, same(bits(struck), bits(clean))
    struck, clean = two(zero=False)
    looks_at_the_norm(struck, steps, bad, rank)
    looks_at_the_norm(clean, without(steps, bad), None, rank)
    found["own loop, synchronised"] = struck[1].skipped_steps + 1, same(bits(struck), bits(clean))
    return found


@pytest.mark.parametrize("name", ["O2", *(pytest.param(name, marks=pytest.mark.nightly(15)) for name in ("O1", "O3"))])
def test_a_step_skipped_on_several_processes_leaves_no_trace_on_any(name):
    for found in dist.run(on_ranks, 2, name):
        assert found == dict.fromkeys(found, (1, True))
