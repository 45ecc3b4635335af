"""O3 under FSDP2: the stored FP8 weight is what is gathered, and each rank has the FP16 masters of its rows."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import msamp
from helpers import dist
from helpers.fsdp_nets import Net, everything, trained, wanting
from msamp.integrations import fsdp
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor

RECIPE = by_name("O3").with_scaling(Delayed(window=2))


def prepared(seed: int = 0) -> nn.Module:
    model = fsdp.prepare(Net(seed), RECIPE, accept=everything)
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.blocks[0], model):
        fully_shard(part, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    xs = (torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)) for step in steps)
    return trained(model, optimizer, ((x, torch.tanh(x[:, :1])) for x in xs))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) for k in a)


def several(early: bool) -> dict[str, Any]:
    """A run, what it saves, and a second one that loads it: weights before or after the optimizer is built."""
    rank = torch.distributed.get_rank()
    model = prepared()
    optimizer = fsdp.optimizer(model, wanting(model), RECIPE)
    train(model, optimizer, range(4), rank)
    saved = [(fsdp.model_state(model), optimizer.state_dict())]
    torch.distributed.broadcast_object_list(saved)
    weights, states = saved[0]
    again = prepared(1)
    if early:
        fsdp.load_model(again, weights)
    other = fsdp.optimizer(again, wanting(again), RECIPE)
    alone = None
    if early:  # the masters of `prepare` are of other weights
        train(again, other, range(4, 5), rank)
        alone = fsdp.model_state(again)
    fsdp.load_model(again, weights)
    other.load_state_dict(states)
    resumed = train(again, other, range(4, 6), rank)
    went_on = train(model, optimizer, range(4, 6), rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        third = fsdp.optimizer(model, wanting(model), RECIPE)
    train(model, third, range(6, 7), rank)
    return {
        "resumed": resumed,
        "went on": went_on,
        "weights": weights,
        "states": states,
        "alone": alone,
        "warned": [str(each.message) for each in caught],
    }


@pytest.mark.promise("FSDP2", "O3 resumes bit for bit, and one process takes up what several saved.")
def test_o3_resumes_with_the_bits_of_a_run_that_went_on_and_one_process_takes_it_up():
    ranks = dist.run(several, 2, False)
    for found in ranks:
        assert found["resumed"] == found["went on"]
        assert any("the masters of recipe 'O3' start from the weights in fp8-e4m3" in text for text in found["warned"])
    weights, states = ranks[0]["weights"], ranks[0]["states"]
    assert isinstance(states["state"][0]["master"], ScalingTensor)
    model = Net(2)
    model, optimizer = msamp.initialize(model, wanting(model), RECIPE, accept=everything)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert same(dict(model.state_dict()), weights)
    assert same(optimizer.state_dict()["state"], states["state"])


def test_weights_loaded_before_the_optimizer_is_built_replace_the_masters_of_prepare():
    found, _ = dist.run(several, 2, True)
    assert found["resumed"] == found["went on"]
    before, after = (found[key]["blocks.0.0.weight"].dequantize() for key in ("weights", "alone"))
    assert 0 < (after - before).abs().max() < 0.1  # one step from the loaded weights, not from those of `prepare`
