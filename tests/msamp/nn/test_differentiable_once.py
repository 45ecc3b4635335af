"""No low-precision layer gives a second derivative that is silently wrong."""

import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import make

REFUSED = r"create_graph=True reached {}, which has no second derivative.*exclude_names"
functional = torch.autograd.functional


def ends_in_fp8() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
    return msamp.initialize(model, None, recipe="O2")[0]


SECOND = {
    "hvp": lambda f, x: functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: functional.vhp(f, x, torch.ones_like(x)),
    "jvp": lambda f, x: functional.jvp(f, x, torch.ones_like(x)),
    "hessian": lambda f, x: functional.hessian(f, x),
    "hvp with a graph": lambda f, x: functional.hvp(f, x.requires_grad_(), torch.ones_like(x), create_graph=True),
    "grad of grad, unused allowed": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x.requires_grad_()), x, create_graph=True)[0].sum(), x, allow_unused=True
    ),
    "penalty": lambda f, x: (torch.autograd.grad(f(x.requires_grad_()), x, create_graph=True)[0].norm() - 1).square().backward(),
}


@pytest.mark.promise("Conversion", "Second derivatives through FP8 layers are refused, wherever the layer stands.")
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused(name):
    model = ends_in_fp8()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=REFUSED.format(r"2\.weight")):
            SECOND[name](lambda x, each=each: each(x).sum(), make("normal", (2, 32)))


def test_a_first_derivative_in_the_middle_of_one_is_taken():
    model, x = ends_in_fp8(), make("normal", (2, 32))
    assert functional.vjp(lambda x: model(x).sum(), x)[1].abs().sum() > 0
    assert functional.jacobian(lambda x: model(x).sum(0), x).abs().sum() > 0


def test_layers_that_a_filter_keeps_have_second_derivatives():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
    x, f = make("normal", (2, 32)), lambda x: model(x).sum()
    want = functional.hvp(f, x, torch.ones_like(x))[1]
    kept = msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r"^[02]$"))
    with pytest.warns(UserWarning, match="converted no layer"):
        msamp.initialize(model, None, recipe="O2", accept=kept)
    assert functional.hvp(f, x, torch.ones_like(x))[1].equal(want)
