"""AdamW over its kernels (under the interpreter here, compiled on a GPU) against AdamW over their twins; also in a graph."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.choices import each_once
from helpers.numerics import bits, make, same
from msamp.kernels import ops
from msamp.numerics.formats import BF16, by_name
from msamp.numerics.recipe import FP32_STATES, O1, O2, O3, Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer

SHAPES = {"linear": [(33, 17), (16, 48), (5,)], "matrix": [(12, 8)], "vector": [(7,), (), (16,)]}
LEVELS = (O1, O2, O3)
every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda recipe: recipe.name)


def use(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton` or `reference` for everything that works on many tensors."""
    find = ops._implementation

    def implementation(twin: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        if (name := twin.__name__) in ("adamw", "grad_stats", "pack"):
            return getattr(importlib.import_module(f"msamp.kernels.{package}.{name}"), name)
        return find(twin, device_type)

    monkeypatch.setattr(ops, "_implementation", implementation)


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch takes roots from MKL, which on some machines are off by one place; the kernel's are correctly rounded."""
    root = torch._foreach_sqrt
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda xs: root(xs) if xs[0].is_cuda else [x.double().sqrt().float() for x in xs])


class Training:
    """A model's weights in the formats of a level, and made-up gradients."""

    def __init__(self, level: Recipe, device: torch.device | str, shapes=SHAPES, **settings: Any) -> None:
        self.formats = {
            "linear": (level.weight, level.states),
            "matrix": (BF16, level.with_states(grad=BF16).states),
            "vector": (BF16, FP32_STATES),
        }
        self.groups = []
        for number, (kind, (weight, states)) in enumerate(self.formats.items()):
            xs = [make("normal", s or (1,), 10 * number + i).view(s).to(device) * 0.1 for i, s in enumerate(shapes[kind])]
            params = [nn.Parameter(ScalingTensor.quantize(x, weight) if weight.scaled else x.to(weight.dtype)) for x in xs]
            self.groups.append({"params": params, "formats": states, "weight_decay": 0.1 * (kind != "vector")})
        self.optimizer = LowPrecisionOptimizer(self.groups, lr=0.02, betas=(0.9, 0.95), **{"clip_grad": 0.5, **settings})
        self.params = [p for group in self.groups for p in group["params"]]

    def gradients(self, step: int, bad: bool = False) -> list[torch.Tensor]:
        found = []
        for number, group in enumerate(self.groups):
            for p in group["params"]:
                g = make("log-normal", p.shape or (1,), 100 * step + len(found)).view(p.shape).to(p.device)
                if bad and len(found) == 1:
                    g.view(-1)[-1] = float("nan")
                fmt = by_name(self.optimizer.param_groups[number]["formats"]["grad"])
                found.append(ScalingTensor.quantize(g, fmt) if fmt.scaled else g.to(fmt.dtype))
        return found

    def step(self, number: int, bad: bool = False) -> "Training":
        for p, g in zip(self.params, self.gradients(number, bad), strict=True):
            p.main_grad = g
        self.optimizer.step()
        return self

    def bits(self) -> list[torch.Tensor]:
        tensors = []
        for p in self.params:
            for x in (p, *self.optimizer.state[p].values()):
                tensors += [bits(x.payload).clone(), bits(x.scale_inv).clone()] if isinstance(x, ScalingTensor) else [bits(x).clone()]
        return tensors


def run(package: str, monkeypatch: pytest.MonkeyPatch, level: Recipe, device, **settings: Any) -> tuple[list[torch.Tensor], ...]:
    """All bits after each of four steps, one of them skipped, with weights loaded and a state saved and loaded between; the norms."""
    use(package, monkeypatch)
    training = Training(level, device, **settings)
    states, norms = [], []
    for number in range(4):
        training.step(number, bad=number == 1)
        norms.append(float(training.optimizer.grad_norm))
        states += training.bits()
        if number == 2:
            with torch.no_grad():
                training.params[0].copy_(make("normal", training.params[0].shape, 77).to(device) * 4)
            training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert training.optimizer.skipped_steps == 1
    return states, [bits(torch.tensor(norm, dtype=torch.float64)) for norm in norms if norm == norm]


@each_once(2, level=LEVELS, settings=[{}, {"decoupled": False, "clip_grad": None}])
def test_the_kernels_are_their_twins_over_a_whole_step(level, settings, triton_device, monkeypatch):
    got, want = (run(package, monkeypatch, level, triton_device, **settings) for package in ("triton", "reference"))
    assert same(got[0], want[0])
    assert same(got[1], want[1])


@every_level
def test_the_amaxes_of_the_gradients_tell_which_was_not_finite(level, triton_device, monkeypatch):
    use("triton", monkeypatch)
    training = Training(level, triton_device).step(0)
    gradients = [g.dequantize() if isinstance(g, ScalingTensor) else g for g in training.gradients(0)]
    assert training.optimizer.grad_amaxes.tolist() == [float(g.abs().amax()) for g in gradients]
    where = training.optimizer.grad_amaxes.data_ptr()
    training.step(1, bad=True)
    assert training.optimizer.grad_amaxes.isfinite().tolist() == [i != 1 for i in range(len(gradients))]
    assert training.optimizer.grad_amaxes.data_ptr() == where  # a graph writes there


def test_weights_that_are_not_laid_out_by_rows(device):
    def trained(turned: bool) -> torch.Tensor:
        x = make("normal", (16, 8), device=device)
        p = nn.Parameter(x.t().contiguous().t() if turned else x)
        optimizer = LowPrecisionOptimizer([p], formats=O2.states)
        for step in range(3):
            p.grad = make("normal", (16, 8), step, device)
            optimizer.step()
        return p.detach().contiguous()

    assert bits(trained(True)).equal(bits(trained(False)))


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@every_level
def test_no_step_but_the_first_waits_for_the_host(level):
    training = Training(level, "cuda")
    training.step(0)
    gradients = [training.gradients(number, bad=number == 2) for number in range(1, 4)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for made in gradients:
            for p, g in zip(training.params, made, strict=True):
                p.main_grad = g
            training.optimizer.step()
            skipped = training.optimizer.skipped()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not bool(skipped)
    assert training.optimizer.skipped_steps == 1


@pytest.mark.gpu
@every_level
def test_a_graph_holds_a_step(level):
    eager, held = Training(level, "cuda"), Training(level, "cuda")
    for training in (eager, held):
        training.step(0)
    static = [p.main_grad for p in held.params]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        held.optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.optimizer.step()
    assert same(eager.bits(), held.bits()), "capturing runs nothing"
    for number in range(1, 5):
        bad = number == 2
        eager.step(number, bad)
        for g, new in zip(static, held.gradients(number, bad), strict=True):
            if isinstance(g, ScalingTensor):
                g.payload.copy_(new.payload)
                g.scale_inv.copy_(new.scale_inv)
            else:
                g.copy_(new)
        held.optimizer.refresh()
        graph.replay()
        assert bool(held.optimizer.skipped()) == bad
        assert same(eager.bits(), held.bits())
        for training in (eager, held):
            for group in training.optimizer.param_groups:
                group["lr"] *= 0.7
    assert held.optimizer.skipped_steps == eager.optimizer.skipped_steps == 1
