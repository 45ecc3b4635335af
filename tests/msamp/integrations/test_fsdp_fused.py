"""FSDP2 with FP8: gathered weights go into fused blocks, and gradients of micro-batches accumulate."""

from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import msamp
from helpers import dist
from helpers.fsdp_nets import FusedNet, Net, everything, one_thread, trained, wanting
from msamp.integrations import fsdp
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor

STEPS = 5
RECIPE = by_name("O2").with_scaling(Delayed(window=2))  # both phases of delayed scaling are seen


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step + 2))
    return x, torch.tanh(x[:, :1])


def sharded(model: nn.Module, **options: Any):
    fsdp.prepare(model, RECIPE, accept=everything)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, fsdp.optimizer(model, wanting(model), RECIPE)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(isinstance(a[k], ScalingTensor) == isinstance(b[k], ScalingTensor) and a[k].equal(b[k]) for k in a)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses of steps of two micro-batches, of which only the second reduces gradients; a weight is frozen from the third step on."""
    losses = []
    for step in range(STEPS):
        model.blocks[0][0].weight.requires_grad_(step < 2)
        for micro in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            x, y = batch(2 * step + micro)
            loss = (model(x) - y).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def accumulated_alike() -> list[float]:
    return accumulated(*sharded(Net(), reshard_after_forward=False))


def test_gradients_of_micro_batches_accumulate_as_on_one_process():
    losses, again = dist.run(accumulated_alike, 2)
    with one_thread():
        model = Net()
        model, optimizer = msamp.initialize(model, wanting(model), RECIPE, accept=everything)
        expected = accumulated(model, optimizer)
    assert losses == again
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0.08)  # one process rounds each micro-batch's gradient to FP8


def train_fused(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    xs = (batch(step)[0].view(16, 2, 64) for step in range(STEPS - 1))
    return trained(model, optimizer, ((x, torch.tanh(x)) for x in xs))


def fused_alike() -> tuple[list[float], dict[str, Any]]:
    model, optimizer = sharded(FusedNet())
    return train_fused(model, optimizer), fsdp.model_state(model)


@pytest.mark.promise("FSDP2", "Gathered FP8 weights go into fused blocks, with the bits of one process.")
def test_gathered_weights_go_into_fused_blocks_with_the_bits_of_one_process():
    (losses, weights), (again, _) = dist.run(fused_alike, 2)
    with one_thread():
        model = FusedNet()
        model, optimizer = msamp.initialize(model, wanting(model), RECIPE, accept=everything)
        assert losses == again == train_fused(model, optimizer)
        assert same(weights, dict(model.state_dict()))
