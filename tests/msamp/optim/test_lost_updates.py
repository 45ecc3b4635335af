"""The share of the next update that the master weights will lose, against the step that follows, at every level."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import undelivered_frac
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_error import lost_updates, update_distances

SMALL, USUAL = 1e-7, 1e-3
BF16_MODELS = ("bf16-dmw", "collage-light", "collage-plus", "bf16-a")


def linears(recipe: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.normal_(0, 0.02)
    return model.bfloat16() if recipe in BF16_MODELS else model


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, recipe: str) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(x.bfloat16() if recipe in BF16_MODELS else x).float() - x.roll(1, 1)).square().mean().backward()


def before_a_step(recipe: str, lr: float, steps: int = 2, **settings: Any) -> tuple[nn.Module, LowPrecisionOptimizer]:
    """After some steps, with the gradients of the next in place."""
    model = linears(recipe)
    settings = {"master_rounding": "nearest"} | settings
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe=recipe, **settings)
    for step in range(steps + 1):
        backward(model, optimizer, step, recipe)
        if step < steps:
            optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("recipe", "small", "usual"),
    [
        ("O0", (0.0, 0.01), (0.0, 0.01)),
        ("O1", (0.9, 1.0), (0.0, 0.02)),
        ("O2", (0.9, 1.0), (0.0, 0.02)),
        ("O3", (0.9, 1.0), (0.0, 0.02)),
        ("coat", (0.0, 0.01), (0.0, 0.01)),
        ("collage-light", (0.0, 0.02), (0.0, 0.02)),
        ("collage-plus", (0.0, 0.02), (0.0, 0.02)),
        ("bf16-dmw", (0.98, 1.0), (0.0, 0.02)),
        ("bf16-a", (0.98, 1.0), (0.0, 0.02)),
    ],
)
def test_every_level_loses_what_its_masters_cannot_hold(recipe, small, usual):
    for lr, (least, most) in ((SMALL, small), (USUAL, usual)):
        model, optimizer = before_a_step(recipe, lr)
        shares = lost_updates(optimizer)
        assert list(shares) == [name for name, _ in model.named_parameters()]
        for name in ("0.weight", "2.weight"):
            assert least <= shares[name] <= most, (name, lr)


def values(optimizer: LowPrecisionOptimizer, p: torch.Tensor) -> torch.Tensor:
    return fp32_values(optimizer.state[p].get("master", p)).double().clone()


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3"])
def test_the_share_is_that_of_the_step_that_follows(recipe):
    """`undelivered_frac` of the real step, against the update by hand."""
    lr = 3e-6
    model, optimizer = before_a_step(recipe, lr)
    shares, before = lost_updates(optimizer), {}
    for name, p in model.named_parameters():
        state, old = optimizer.state[p], values(optimizer, p)
        g = fp32_values(ScalingTensor.quantize(p.grad.float(), msamp.formats.E4M3) if p.dim() == 2 else p.grad).double()
        m, v = (fp32_values(state[key]).double() for key in ("exp_avg", "exp_avg_sq"))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        before[name] = old, -lr * (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8) - lr * 1e-2 * old
    optimizer.step()
    for name, p in model.named_parameters():
        old, update = before[name]
        assert shares[name] == pytest.approx(undelivered_frac(update, values(optimizer, p) - old), abs=5e-3), name
    assert 0.4 < shares["0.weight"] < 0.9


def bits(optimizer: LowPrecisionOptimizer) -> list[bytes]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in params for t in (p, *(v for _, v in sorted(optimizer.state[p].items())))]
    plain = [part.detach() for t in tensors for part in ([t.payload, t.scale_inv] if isinstance(t, ScalingTensor) else [t])]
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in plain]


@pytest.mark.parametrize("recipe", ["O2", "O3", "coat", "collage-light"])
def test_it_changes_no_bit_of_the_training(recipe):
    ends = []
    for asks in (False, True):
        model, optimizer = before_a_step(recipe, USUAL, steps=0)
        for step in range(3):
            backward(model, optimizer, step, recipe)
            if asks:
                lost_updates(optimizer)
            optimizer.step()
        ends.append(bits(optimizer))
    assert ends[0] == ends[1]


def test_what_has_no_update_has_lost_none():
    model, optimizer = before_a_step("O2", SMALL, steps=0)
    assert lost_updates(optimizer) == dict.fromkeys(dict(model.named_parameters()), 0.0)  # before the first step
    model, optimizer = before_a_step("O2", SMALL)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    model[0].weight.grad = None
    assert lost_updates(optimizer)["0.weight"] == 0.0
    assert lost_updates(optimizer)["2.weight"] > 0.9
    optimizer.param_groups[0]["lr"] = 0.0
    assert set(lost_updates(optimizer).values()) == {0.0}
    optimizer.param_groups[0]["lr"] = SMALL
    model[2].bias.grad.fill_(math.nan)  # the step will be skipped
    assert set(lost_updates(optimizer).values()) == {0.0}
    optimizer.step()
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3", "bf16-dmw"])
def test_stochastic_rounding_loses_nothing_but_leaves_most_elements(recipe):
    """An update of 1e-6 is a small part of a code: what arrives is a few elements that move by whole codes."""
    model, optimizer = before_a_step(recipe, 1e-6, steps=6, master_rounding="stochastic")
    distances = update_distances(optimizer, None)
    p, old = model[0].weight, values(optimizer, model[0].weight)
    wanted, arrived = distances[:, 0], distances[:, 1]
    optimizer.step()
    assert float((values(optimizer, p) == old).float().mean()) > 0.8
    matrices = [place for place, q in enumerate(model.parameters()) if q.dim() == 2]
    assert float(arrived[matrices].sum() / wanted[matrices].sum()) == pytest.approx(1.0, abs=0.35 if recipe == "bf16-dmw" else 0.1)
    if recipe != "bf16-dmw":  # in BF16 each code is a thousand updates: 6,000 elements tell little
        assert max(lost_updates(optimizer).values()) < 0.5


def test_other_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"the optimizer is AdamW; pass the optimizer from msamp\.initialize"):
        lost_updates(torch.optim.AdamW([nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]))


@pytest.mark.parametrize(("std", "lost"), [(1e-7, 12), (1e-5, 5), (1e-3, 0), (0.0, 0)])
def test_a_scaled_master_at_most_doubles_in_a_step(std, lost):
    """docs/reference/numbers.md: the steps that tiny weights lose at a learning rate of 1e-3, all gradients 1."""
    model = nn.Linear(32, 32, bias=False)
    nn.init.constant_(model.weight, -std)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model, optimizer = msamp.initialize(model, plain, recipe="O2")
    for _ in range(20):
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = -std - float(fp32_values(model.weight).mean())
    assert 20 - moved / 1e-3 == pytest.approx(lost, abs=1)
