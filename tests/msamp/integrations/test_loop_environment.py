"""What surrounds a loop: transforms of torch.func, models without values, parameters of other kinds, layers pruned after conversion."""

import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import make


def converted() -> nn.Sequential:
    torch.manual_seed(0)
    return msamp.initialize(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), None, recipe="O2")[0]


def forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(x, x))


TRANSFORMS = {
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "forward mode": forward_mode,
    "batched gradients": lambda model, x: torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, vectorize=True),
}


@pytest.mark.promise("Conversion", "Transforms of torch.func and forward-mode derivatives name the FP8 layer that has no rule for them.")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_names_the_layer(name):
    model = converted()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=r"^[02]\.weight was called under a .*exclude_names"):
            TRANSFORMS[name](each, make("normal", (4, 32)))
    assert torch.func.functional_call(model, dict(model.named_parameters()), make("normal", (4, 32))).shape == (4, 32)


def with_extra(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64))
    model.extra = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    return model


WITHOUT = {
    "meta": (lambda: nn.Sequential(nn.Linear(32, 64, device="meta")), r"0\.weight is on the meta device.*to_empty"),
    "lazy": (lambda: nn.Sequential(nn.Linear(32, 64), nn.LazyLinear(64)), r"1\.weight belongs to a lazy module.*run a forward"),
    "complex": (lambda: with_extra(torch.complex64), r"extra is torch\.complex64.*view_as_real"),
    "integer": (lambda: with_extra(torch.int64), r"extra is torch\.int64.*register_buffer"),
    "codes": (lambda: with_extra(torch.float8_e4m3fn), r"extra is torch\.float8_e4m3fn.*in its floating-point form"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_parameter_without_values_to_train_is_told_what_to_do(name):
    make_model, match = WITHOUT[name]
    model = make_model()
    kinds = [type(module) for module in model.modules()]
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            msamp.initialize(model, None, recipe="O2")
    assert [type(module) for module in model.modules()] == kinds
