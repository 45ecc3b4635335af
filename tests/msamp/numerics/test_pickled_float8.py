"""States with plain float8 tensors survive pickle, deepcopy, copy and torch.save."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import codes, make
from msamp.numerics.pickled_float8 import AsBytes, packed, unpacked


def saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = {"pickle": lambda pair: pickle.loads(pickle.dumps(pair)), "deepcopy": copy.deepcopy, "torch.save": saved}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[torch.Tensor]:
    x = make("normal", (16, 32), seed).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    (model(x) - x).float().square().mean().backward()
    optimizer.step()
    return [msamp.fp32_values(p).clone() for p in model.parameters()]


@pytest.mark.promise("Hosts", "A pickle of model and optimizer trains on bit for bit, with COAT and Collage in FP8 too.")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["coat", "collage-fp8", "O3"])
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_with_float8_states_trains_on_bit_for_bit(recipe, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16 if recipe == "collage-fp8" else torch.float32)
    pair = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    step(*pair, 0)
    other = WAYS[way](WAYS[way](pair))  # twice
    for seed in (1, 2):
        assert all(a.equal(b) for a, b in zip(step(*other, seed), step(*pair, seed), strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_only_float8_is_packed_and_unpacked(dtype):
    x, wide = make("normal", (4, 16)).to(dtype), torch.ones(2)
    held = {"state": {0: {"m": x, "step": wide}, 1: {}}, "param_groups": [1]}
    told = packed(held)
    assert isinstance(told["state"][0]["m"], AsBytes)
    assert told["state"][0]["step"] is wide
    assert held["state"][0]["m"] is x
    assert unpacked(told)["state"][0]["m"] is x
    restored = pickle.loads(pickle.dumps(told))["state"][0]["m"]
    assert restored.dtype == dtype
    assert codes(restored).equal(codes(x))


def test_a_state_without_parameters_is_left_alone():
    assert unpacked({"seed": 1}) == {"seed": 1}
