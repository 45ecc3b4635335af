"""SGD's and Muon's arithmetic: torch's own bits on FP32, and what an orthogonalised matrix is."""

import pytest
import torch
from torch import nn

from helpers.choices import every_pair
from msamp.optim import updates
from msamp.optim.updates.momentum import ADJUSTMENTS, COEFFICIENTS, Tensors, orthogonal

STEPS = 4
SGD, MUON = updates.by_name("sgd-momentum"), updates.by_name("muon")
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")


def drawn(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("number", [float, lambda x: torch.tensor(x, dtype=torch.float64)], ids=["host", "device"])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.25}, {"weight_decay": 0.1}], ids=str)
def test_heavy_ball_is_torch_s_sgd(options, number):
    start, *gradients = drawn((24, 16), STEPS + 1)
    p, q, buffer = start.clone(), nn.Parameter(start.clone()), torch.zeros(24, 16)
    theirs = torch.optim.SGD([q], lr=0.1, momentum=0.9, foreach=False, **options)
    decay, dampening = options.get("weight_decay", 0.0), options.get("dampening", 0.0)
    for step, g in enumerate(gradients):
        q.grad = g.clone()
        theirs.step()
        numbers = (number(0.1), number(decay), number(0.9), number(dampening))
        group = {"weight_decay": decay, "dampening": dampening, "nesterov": options.get("nesterov", False), "decoupled": False}
        SGD.change_(Tensors(p, g, buffer, torch.tensor(step == 0)), numbers, group)
        if number is float:
            assert p.equal(q)
        else:  # the same numbers, added in FP32 without a fused product
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-6)


def test_without_a_buffer_the_step_is_the_gradient_and_decay_may_stand_apart():
    start, g = drawn((8, 8), 2)
    p = start.clone()
    group = {"weight_decay": 0.1, "dampening": 0.0, "nesterov": False, "decoupled": True}
    SGD.change_(Tensors(p, g, None, torch.tensor(True)), (0.5, 0.1, 0.0, 0.0), group)
    assert p.equal((start * (1 - 0.5 * 0.1)).add_(g, alpha=-0.5))


@every_pair
@needs_muon
@pytest.mark.parametrize("number", [float, lambda x: torch.tensor(x, dtype=torch.float64)], ids=["host", "device"])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_muon_is_torch_s(adjust, shape, number):
    start, *gradients = drawn(shape, STEPS + 1)
    p, q, buffer = start.clone(), nn.Parameter(start.clone()), torch.zeros(shape)
    theirs = torch.optim.Muon([q], lr=0.1, weight_decay=0.1, adjust_lr_fn=adjust)
    for g in gradients:
        q.grad = g.clone()
        theirs.step()
        group = MUON.options() | {"weight_decay": 0.1, "adjust_lr_fn": adjust}
        MUON.change_(Tensors(p, g, buffer, torch.tensor(False)), (number(0.1), number(0.1), number(0.95), 0.0), group)
        assert p.equal(q) if number is float else torch.allclose(p, q, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (16, 16), (1, 16)])
def test_what_is_orthogonal_has_singular_values_next_to_one_and_the_directions_it_had(shape):
    (x,) = drawn(shape, 1)
    y = orthogonal(x, COEFFICIENTS, 5, 1e-7).float()
    assert y.shape == x.shape
    assert torch.linalg.svdvals(y).amin() > 0.6
    assert torch.linalg.svdvals(y).amax() < 1.3
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    assert (u.T @ y @ vt.T).diagonal().amin() > 0.6
    assert orthogonal(0 * x, COEFFICIENTS, 5, 1e-7).eq(0).all()
