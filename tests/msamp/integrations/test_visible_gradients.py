"""Between backward and step `p.grad` is the gradient, on one process and on two, and who does not look pays nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import msamp
from helpers import dist
from helpers.numerics import make
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import fp32_values

LEVELS = ("O2", "O3", "fp32")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
        self.side = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, side: bool = True) -> torch.Tensor:
        return self.body(x) + (self.side(x) if side else 0)


def begin(level: str, **options):
    model = Net()
    return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, weight_decay=0.0), recipe=level, **options)


def loss(model: nn.Module, step: int, **options) -> torch.Tensor:
    rank, ranks = dist.place()
    x = make("normal", (16, 32), step).chunk(ranks)[rank]
    return (model(x, **options) - x.roll(1, 1)).square().mean()


# ------------------------------------------------------------------------------------------ what loops do between backward and step


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 3.0


def masked(model: nn.Module) -> None:
    model.body[0].weight.grad[:8] = 0.0
    model.side.weight.grad.view(-1)[:100].zero_()


def dropped(model: nn.Module) -> None:
    model.side.weight.grad = None
    model.side.bias.grad = torch.zeros(32)


def flat(model: nn.Module) -> None:
    whole = torch.cat([g.flatten() for g in gradients(model)]) * 2.0
    for g, part in zip(gradients(model), whole.split([g.numel() for g in gradients(model)]), strict=True):
        g.copy_(part.view_as(g))


def through_aliases(model: nn.Module) -> None:
    for g in gradients(model):
        g.data.mul_(2.0)
        g.detach().neg_()


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "each": lambda model: [g.mul_(3.0) for g in gradients(model)],
    "foreach": lambda model: torch._foreach_mul_(gradients(model), 3.0),
    "foreach div": lambda model: torch._foreach_div_(gradients(model), [0.5] * len(gradients(model))),
    "replaced": replaced,
    "masked": masked,
    "dropped": dropped,
    "flat": flat,
    "aliases": through_aliases,
    "clip value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "clip norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-2),
    "ours, then by hand": lambda model: [msamp.clip_grad_norm_(model.parameters(), 1e-2), *(g.mul_(2.0) for g in gradients(model))],
    "by hand, then ours": lambda model: [*(g.mul_(2.0) for g in gradients(model)), msamp.clip_grad_norm_(model.parameters(), 1e-2)],
}


def trained(level: str, edit: Callable[[nn.Module], object], **options) -> list[torch.Tensor]:
    """The norms of the steps' gradients, and the weights."""
    model, optimizer = begin(level, **options)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        loss(model, step).backward()
        edit(model)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return [torch.stack(norms), *(fp32_values(p).clone() for p in model.parameters())]


ZERO = {"fp32": (False, True), "O2": (True,), "O3": (False,)}  # each way at a level with FP8 gradients


def every_edit(level: str) -> dict[tuple[str, bool], list[torch.Tensor]]:
    return {(name, zero): trained(level, edit, zero=zero) for name, edit in EDITS.items() for zero in ZERO[level]}


@pytest.mark.promise("Hosts", "Edits of `p.grad` between backward and step have their effect on any number of processes, also under ZeRO.")
@pytest.mark.parametrize("level", LEVELS)
def test_edits_have_the_effect_that_they_have_on_one_process(level):
    first, second = dist.run(every_edit, 2, level)
    near = 1e-4 if level == "fp32" else 0.02
    for name, edit in EDITS.items():
        want = trained(level, edit)
        for zero in ZERO[level]:
            assert all(a.equal(b) for a, b in zip(first[name, zero], second[name, zero], strict=True)), name
            assert all((a - b).norm() <= near * b.norm() for a, b in zip(first[name, zero], want, strict=True)), name
            if name != "nothing":
                assert not all(a.equal(b) for a, b in zip(first[name, zero], first["nothing", zero], strict=True)), name


# --------------------------------------------------------------------------------------------------------------------- only reading


def norms(model: nn.Module) -> torch.Tensor:
    return nn.utils.get_total_norm(gradients(model))


def read_or_not(level: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for zero in (False, True):
        runs = {}
        for reads in (False, True):
            model, optimizer = begin(level, zero=zero)
            for step in range(4):
                with optimizer.no_sync():
                    loss(model, step).backward()
                    if reads:
                        norms(model)
                loss(model, step + 10).backward()
                here = gradients(model)
                assert len(here) == len(list(model.parameters()))
                assert not any(g.fetched for g in here)  # `is None` costs nothing
                if reads:
                    found[f"norm, {zero}"] = float(norms(model))
                    assert float(norms(model)) == found[f"norm, {zero}"]
                    for duplicate in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
                        assert all(p.grad is None for p in duplicate(model).parameters())
                        assert duplicate(here[0]).dequantize().equal(here[0].dequantize())
                optimizer.step()
                found[f"{step} after, {zero}"] = float(optimizer.grad_norm)
                assert all(p.grad is None for p in model.parameters())
            runs[reads] = [fp32_values(p).clone() for p in model.parameters()]
        found[f"same, {zero}"] = all(a.equal(b) for a, b in zip(runs[False], runs[True], strict=True))
        assert found[f"norm, {zero}"] == pytest.approx(found[f"3 after, {zero}"], rel=1e-5)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_reading_changes_no_bit_and_shows_the_average(level):
    first, second = dist.run(read_or_not, 2, level)
    assert first == second
    assert first["same, False"]
    assert first["same, True"]
    assert first["norm, False"] == first["norm, True"]


def reused() -> None:
    """The objects in p.grad are used again, unless the loop kept or read them."""
    model, optimizer = begin("O2", zero=False)
    weight = model.body[0].weight
    loss(model, 0).backward()
    number = id(weight.grad)
    optimizer.step()
    loss(model, 1).backward()
    assert id(weight.grad) == number
    kept = weight.grad
    optimizer.step()
    loss(model, 2).backward()
    assert weight.grad is not kept
    with pytest.raises(ValueError, match=r"p\.grad\.clone"):
        kept.norm()
    read = weight.grad
    value = float(read.norm())
    optimizer.zero_grad()
    loss(model, 3).backward()
    assert float(read.norm()) == value
    assert weight.grad is not read
    assert "awaited" in repr(weight.grad)
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    optimizer.synchronize()


def on_one_rank_only() -> list[float]:
    """Rank 0 logs, and another rank uses fewer layers."""
    rank, _ = dist.place()
    model, optimizer = begin("O2", zero=False)
    logged = []
    for step in range(2):
        loss(model, step).backward()
        if rank == 0:
            logged.append(float(norms(model)))
        optimizer.step()
    model, optimizer = begin("O3")  # ZeRO
    loss(model, 0).backward()
    optimizer.synchronize()
    if rank == 0:
        logged.append(float(norms(model)))
    optimizer.step()
    # A layer that one rank does not use: p.grad is None there.
    for zero in (False, True):
        model, optimizer = begin("O2", zero=zero)
        loss(model, 0, side=rank == 0).backward()
        if rank == 1:
            assert model.side.weight.grad is None
            with pytest.raises(ValueError, match=r"side.*synchronize\(\) on every rank"):
                norms(model)
        else:
            optimizer.synchronize()
        optimizer.synchronize()
        logged.append(float(norms(model)))
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(logged[-1], rel=1e-5)
    return logged


def hooked() -> str:
    """A hook that reads p.grad in backward is refused."""
    model, _ = begin("O2", zero=False)
    model.side.weight.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    with pytest.raises(ValueError, match="hook used") as caught:
        loss(model, 0).backward()
    return str(caught.value)


@pytest.mark.parametrize("situation", [reused, hooked])
def test_on_two_processes(situation):
    dist.run(situation, 2)


def test_one_rank_may_log_and_another_may_use_fewer_layers():
    first, second = dist.run(on_one_rank_only, 2)
    assert first[3:] == second
    assert all(norm > 0 for norm in first)


def test_on_one_process_gradients_are_those_of_torch():
    model, optimizer = begin("O2")
    loss(model, 0).backward()
    assert all(not isinstance(p.grad, FP8Gradient) or p.grad.fetched for p in model.parameters())
    optimizer.synchronize()


def surgery(model: nn.Module, step: int) -> None:
    """Gradients of two losses from `torch.autograd.grad`, of which the loop sets a mixture by hand."""
    params = list(model.parameters())
    first = torch.autograd.grad(loss(model, step), params)
    second = torch.autograd.grad(loss(model, step + 100), params)
    for p, a, b in zip(params, first, second, strict=True):
        p.grad = a + 0.5 * b


def clipped_micro_batches(model: nn.Module, step: int, optimizer: Any) -> None:
    with optimizer.no_sync():
        loss(model, step).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    loss(model, step + 100).backward()


def frozen_later(model: nn.Module, step: int) -> None:
    model.side.requires_grad_(step < 1)
    loss(model, step).backward()
    gradients(model)[0].norm()


def situations(level: str, zero: bool | None) -> dict[str, list[torch.Tensor]]:
    found = {}
    for situation in (surgery, clipped_micro_batches, frozen_later):
        model, optimizer = begin(level, **({} if zero is None else {"zero": zero}))
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            situation(model, step, *([optimizer] if situation is clipped_micro_batches else []))
            optimizer.step()
            norms.append(optimizer.grad_norm)
        found[situation.__name__] = [torch.stack(norms), *(fp32_values(p).clone() for p in model.parameters())]
    return found


@pytest.mark.parametrize(("level", "zero"), [("fp32", False), ("O2", False), ("O3", True)])
def test_surgery_clipped_micro_batches_and_freezing_are_as_on_one_process(level, zero):
    first, second = dist.run(situations, 2, level, zero)
    want = situations(level, None)
    near = 1e-4 if level == "fp32" else 0.02
    for name in want:
        assert all(a.equal(b) for a, b in zip(first[name], second[name], strict=True)), name
        if name != "clipped_micro_batches":  # each process clips its own sum
            assert all((a - b).norm() <= near * b.norm() for a, b in zip(first[name], want[name], strict=True)), name
    assert first["clipped_micro_batches"][0].max() > 0
