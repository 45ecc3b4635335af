"""FP8AdamW's states and masters, when others write or load them."""

import copy

import pytest
import torch
from numerics import make
from torch import nn

from msamp.numerics.formats import E5M2, FP16
from msamp.numerics.recipe import FP32_STATES, O2, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW


def trained(formats: StateFormats, names: tuple[str, ...] = (), steps: int = 2) -> FP8AdamW:
    """An optimizer of two parameters, plain where its formats are FP32, after some steps."""
    values = [make("normal", (4, 16), seed=seed) for seed in range(2)]
    ps = [nn.Parameter(x if formats == FP32_STATES else ScalingTensor.quantize(x, FP16)) for x in values]
    optimizer = FP8AdamW([*zip(names, ps, strict=True)] if names else ps, formats=formats, lr=0.1)
    for step in range(steps):
        for i, p in enumerate(ps):
            p.grad = make("normal", (4, 16), seed=10 + 2 * step + i)
        optimizer.step()
    return optimizer


def snapshot(optimizer: FP8AdamW) -> list[torch.Tensor]:
    """Bytes of all weights and states."""
    tensors = [x for p in optimizer.param_groups[0]["params"] for x in (p, *optimizer.state[p].values())]
    plain = [part for x in tensors for part in ([x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x])]
    return [x.detach().contiguous().reshape(-1).view(torch.uint8).clone() for x in plain]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


IMPOSSIBLE = {
    "nan": (lambda state: state["exp_avg"].payload.fill_(float("nan")), "exp_avg of parameter 0 of group 0 holds .* NaN or infinite"),
    "negative v": (lambda state: state["exp_avg_sq"].payload.neg_(), "exp_avg_sq of parameter 0 of group 0 holds -.*be less than 0"),
    "unknown": (lambda state: state.update(more=torch.ones(1)), "has unknown more"),
    "step": (lambda state: state.update(step=torch.tensor(-1.0)), "step of parameter 0 of group 0 holds -1"),
    "fp32": (lambda state: state.update(exp_avg=state["exp_avg"].dequantize()), "exp_avg .* is torch.float32 .* torch.float8_e4m3fn with"),
    "e5m2": (lambda state: state.update(exp_avg=ScalingTensor.quantize(state["exp_avg"].dequantize(), E5M2)), "is torch.float8_e5m2 with"),
    "shape": (
        lambda state: state.update(exp_avg=state["exp_avg"].t()),
        "exp_avg of parameter 0 of group 0 is .*, and this optimizer keeps",
    ),
    "lacking": (lambda state: state.pop("exp_avg"), "the state of parameter 0 of group 0 lacks exp_avg; load what this model"),
}


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


def test_saved_hyper_parameters_out_of_range_are_refused_and_nothing_changes():
    optimizer, saved = trained(O2.states), trained(O2.states, steps=1).state_dict()
    before = snapshot(optimizer)
    saved["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.load_state_dict(saved)
    assert same(snapshot(optimizer), before)


def test_states_of_another_parameter_are_told_by_their_names():
    saved = trained(O2.states, ("first", "second")).state_dict()
    trained(O2.states, ("first", "second")).load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter group 0 was saved with first where this optimizer has second"):
        trained(O2.states, ("second", "first")).load_state_dict(saved)


def test_a_state_that_is_not_laid_out_by_rows_is_loaded_as_its_values():
    """Kernels take addresses."""
    optimizer = trained(FP32_STATES)
    before, saved = snapshot(optimizer), copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t().contiguous().t()
    optimizer.load_state_dict(saved)
    assert same(snapshot(optimizer), before)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].is_contiguous()
