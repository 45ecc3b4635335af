"""LowPrecisionOptimizer's states and masters, when others write or load them."""

import copy

import pytest
import torch
from torch import nn

from helpers.choices import each_value
from helpers.fp8_adamw import snapshot
from helpers.numerics import make, same
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16
from msamp.numerics.recipe import FP32_STATES, O2, O3, StateFormats
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import LowPrecisionOptimizer


def trained(formats: StateFormats, names: tuple[str, ...] = (), steps: int = 2) -> LowPrecisionOptimizer:
    """An optimizer of two parameters, plain where its formats are FP32, after some steps."""
    values = [make("normal", (4, 16), seed=seed) for seed in range(2)]
    ps = [nn.Parameter(x if formats == FP32_STATES else ScalingTensor.quantize(x, FP16)) for x in values]
    optimizer = LowPrecisionOptimizer([*zip(names, ps, strict=True)] if names else ps, formats=formats, lr=0.1)
    for step in range(steps):
        for i, p in enumerate(ps):
            p.grad = make("normal", (4, 16), seed=10 + 2 * step + i)
        optimizer.step()
    return optimizer


IMPOSSIBLE = {
    "nan": (lambda state: state["exp_avg"].payload.fill_(float("nan")), "exp_avg of parameter 0 of group 0 holds .* NaN or infinite"),
    "negative v": (lambda state: state["exp_avg_sq"].payload.neg_(), "exp_avg_sq of parameter 0 of group 0 holds -.*minimum is 0"),
    "unknown": (lambda state: state.update(more=torch.ones(1)), "has unknown more"),
    "step": (lambda state: state.update(step=torch.tensor(-1.0)), "step of parameter 0 of group 0 holds -1"),
    "fp32": (lambda state: state.update(exp_avg=state["exp_avg"].dequantize()), "exp_avg .* is torch.float32 .* torch.float8_e4m3fn with"),
    "e5m2": (lambda state: state.update(exp_avg=ScalingTensor.quantize(state["exp_avg"].dequantize(), E5M2)), "is torch.float8_e5m2 with"),
    "shape": (lambda state: state.update(exp_avg=state["exp_avg"].t()), "exp_avg of parameter 0 .* is .*, but this optimizer stores"),
    "lacking": (lambda state: state.pop("exp_avg"), "the state of parameter 0 of group 0 lacks exp_avg; load a state"),
}


@pytest.mark.promise("Optimizer states", "Invalid optimizer states are refused before anything changes.")
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_states_that_cannot_be_are_refused_and_nothing_changes(what):
    spoil, message = IMPOSSIBLE[what]
    optimizer, saved = trained(O2.states), copy.deepcopy(trained(O2.states, steps=1).state_dict())
    before = snapshot(optimizer)
    saved["param_groups"][0]["lr"] = 0.5
    spoil(saved["state"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    if what != "lacking":  # which a checkpoint may be, and is begun anew
        with pytest.raises(ValueError, match=message):
            optimizer.take_states(saved["state"])
    assert same(snapshot(optimizer), before)


@pytest.mark.promise("Optimizer states", "States of another parameter are refused by shape or name.")
def test_states_of_another_parameter_are_told_by_their_names():
    saved = trained(O2.states, ("first", "second")).state_dict()
    trained(O2.states, ("first", "second")).load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter group 0 was saved with first, but this optimizer has second"):
        trained(O2.states, ("second", "first")).load_state_dict(saved)


# -------------------------------------------------------------------------------------------------------------- masters

MASTERS = {"O3": (O3.states, E4M3), "fp32 beside bf16": (FP32_STATES, BF16)}
with_masters = pytest.mark.parametrize("kind", MASTERS)


class Loop:
    """Two weights with masters, and an optimizer whose next update is far too small to be seen."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.formats, fmt = MASTERS[kind]
        values = [make("normal", (4, 16), seed=seed + i) for i in range(2)]
        self.ps = [nn.Parameter(ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype)) for x in values]
        self.optimizer = LowPrecisionOptimizer(self.ps, formats=self.formats, lr=0.01, weight_decay=0.0)
        self.optimizer.init_masters(zip(self.ps, values, strict=True))
        self.step(0)
        self.step(1)

    def step(self, seed: int, lr: float = 0.01) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        for i, p in enumerate(self.ps):
            p.grad = make("normal", (4, 16), seed=100 * seed + i).to(p.dtype)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [fp32_values(p).clone() for p in self.ps]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.ps]

    def write(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, w in zip(self.ps, weights, strict=True):
                p.copy_(w)


WRITERS = {
    "copy": lambda loop, w: loop.write(w),
    "load": lambda loop, w: nn.ParameterList(loop.ps).load_state_dict({str(i): x for i, x in enumerate(w)}),
    "fp32": lambda loop, w: loop.write([fp32_values(x) for x in w]),
    "data, told": lambda loop, w: ([p.data.copy_(x) for p, x in zip(loop.ps, w, strict=True)], loop.optimizer.reload_model_params()),
    "a replay": lambda loop, w: (loop.write(w), loop.optimizer.refresh()),
    "new data": lambda loop, w: [setattr(p, "data", x.clone()) for p, x in zip(loop.ps, w, strict=True)],  # vector_to_parameters
}


@pytest.mark.promise("Optimizer states", "Weights written from outside survive the next step at every level with masters.")
@each_value(kind=MASTERS, how=WRITERS)
def test_weights_that_somebody_has_written_survive_the_next_step(kind, how):
    loop, other = Loop(kind), Loop(kind, seed=50)
    WRITERS[how](loop, other.weights())
    want = loop.values()
    assert all(torch.equal(a, b) for a, b in zip(want, other.values(), strict=True))
    loop.step(2, lr=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(loop.values(), want, strict=True))


def test_a_weight_that_is_cast_to_bf16_gets_a_master():
    p = nn.Parameter(torch.ones(4))
    optimizer = LowPrecisionOptimizer([p], formats=FP32_STATES, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.data = p.data.bfloat16()  # as transformers' Trainer.evaluate does with bf16_full_eval
    assert p.float().allclose(torch.tensor(0.99), atol=2**-8)


@with_masters
def test_weights_that_are_swapped_out_and_back_change_nothing(kind):
    """As for an evaluation with averaged weights: the masters keep what the weights cannot hold."""
    loop, twin = Loop(kind), Loop(kind)
    kept = loop.weights()
    loop.write([torch.zeros(4, 16), torch.ones(4, 16)])
    loop.write(kept)
    for each in (loop, twin):
        each.step(2)
    assert same(snapshot(loop.optimizer), snapshot(twin.optimizer))


@pytest.mark.promise("Optimizer states", "Model and optimizer resume bit for bit in either order of loading.")
@with_masters
@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_resume_bit_for_bit_in_either_order(kind, model_first):
    loop, other = Loop(kind), Loop(kind, seed=50)
    saved, weights = copy.deepcopy(loop.optimizer.state_dict()), loop.weights()
    for part in (True, False) if model_first else (False, True):
        other.write(weights) if part else other.optimizer.load_state_dict(saved)
    for each in (loop, other):
        each.step(3)
        each.step(4)
    assert same(snapshot(loop.optimizer), snapshot(other.optimizer))


def stochastic(seed: int = 7) -> tuple[list[nn.Parameter], LowPrecisionOptimizer]:
    ps = [nn.Parameter(ScalingTensor.quantize(torch.randn(8, 16, generator=torch.Generator().manual_seed(i)), FP16)) for i in range(2)]
    return ps, LowPrecisionOptimizer([(f"layer.{i}", p) for i, p in enumerate(ps)], lr=1e-5, formats=O2.states, seed=seed)


def advance(ps: list[nn.Parameter], optimizer: LowPrecisionOptimizer, steps: int) -> None:
    for step in range(steps):
        for i, p in enumerate(ps):
            p.grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()


def test_a_loaded_state_continues_with_its_own_keys_and_rounding_bit_for_bit():
    ps, optimizer = stochastic()
    advance(ps, optimizer, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in ps]
    advance(ps, optimizer, 2)
    again, other = stochastic(seed=9)
    for p, weight in zip(again, weights, strict=True):
        p.data.copy_(weight)
    other.load_state_dict(saved)
    assert other.param_groups[0]["keys"] == optimizer.param_groups[0]["keys"]
    advance(again, other, 2)
    assert all(a.payload.equal(b.payload) for a, b in zip(again, ps, strict=True))


def test_a_state_saved_before_there_was_stochastic_rounding_rounds_to_nearest():
    ps, optimizer = stochastic()
    advance(ps, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["keys"]
        group["formats"] = {name: value for name, value in group["formats"].items() if not name.endswith("_rounding")}
    optimizer.load_state_dict(saved)
    formats = optimizer.param_groups[0]["formats"]
    assert (formats["master_rounding"], formats["moment_rounding"]) == ("nearest", "nearest")
    advance(ps, optimizer, 1)
