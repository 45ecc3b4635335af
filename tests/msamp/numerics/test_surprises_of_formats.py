"""Where torch and the formats' own packages do not do what one would guess, and a user of ours must not notice."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import msamp
from helpers.numerics import make, through_a_file
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.tensor import ScalingTensor

FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


@FP8
@pytest.mark.parametrize("value", [465.0, 480.0, 1e9, float("inf")])
def test_what_does_not_fit_is_the_largest_value(fmt, value):
    """Torch's own cast: NaN on GPUs and up to torch 2.12, 448 on a CPU since 2.13, infinity in E5M2."""
    x = torch.tensor([value, -value, 1.0])
    kept = ScalingTensor.quantize(x, fmt, torch.ones(()))
    want = fmt.max if value > fmt.max else float(torch.tensor(value).to(fmt.dtype))
    assert kept.dequantize().tolist() == [want, -want, 1.0]


@FP8
def test_sums_are_those_of_the_values(fmt):
    """A hundred ones are 16 in NumPy with ml_dtypes, and 64 in jax."""
    ones = ScalingTensor.quantize(torch.ones(100), fmt)
    assert (float(ones.sum()), float(ones.mean()), float(ones.norm())) == (100.0, 1.0, 10.0)


def trained(level: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
    (model(make("normal", (8, 32))) ** 2).mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", ["O2", "O3", "coat"])
def test_copies_travel_by_torch_and_what_pickle_cannot_read_is_not_changed_by_it(level):
    """`pickle.loads` raises for plain float8 tensors, which only COAT's moments are; torch.save, copies and safetensors keep the bits."""
    model, optimizer = trained(level)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copies = [through_a_file(states, weights_only=True), copy.deepcopy(states)]
    if level == "coat":
        with pytest.raises(AttributeError, match="UntypedStorage"):
            pickle.loads(pickle.dumps(states))
    else:
        copies.append(pickle.loads(pickle.dumps(states)))
    for other in copies:
        second, its = trained(level)
        second.load_state_dict(other["model"])
        its.load_state_dict(other["optimizer"])
        x = make("normal", (8, 32), 7)
        assert second(x).equal(model(x))
    exact = msamp.fp8_state_dict(model)
    read = load(save({name: x for name, x in exact.items() if isinstance(x, torch.Tensor)}))
    assert all(x.view(torch.uint8).equal(exact[name].view(torch.uint8)) for name, x in read.items() if x.dim())
