"""FSDP2 with FP8 both ways: gathered weights go into fused blocks, and gradients are reduced in FP8."""

from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def sharded(model: nn.Module, reduce_format: str | None = None, **options: Any):
    fsdp.prepare(model, RECIPE, accept=everything)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, fsdp.optimizer(model, wanting(model), RECIPE, reduce_format=reduce_format)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(isinstance(a[k], ScalingTensor) == isinstance(b[k], ScalingTensor) and a[k].equal(b[k]) for k in a)


def accumulated(reduce_format: str | None, frozen: bool, same_batch: bool, reshard: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of steps of two micro-batches, of which only the second reduces gradients."""
    model, optimizer = sharded(Net(), reduce_format, reshard_after_forward=reshard)
    if frozen:
        model.blocks[0][0].weight.requires_grad_(False)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            rank = 0 if same_batch else torch.distributed.get_rank()
            x, y = batch(4 * step + 2 * micro + rank)
            loss = (model(x) - y).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, fsdp.model_state(model)


def reduced_both_ways() -> list[Any]:
    found: list[Any] = []
    for frozen, same_batch, reshard in ((False, True, True), (True, True, False), (False, False, True)):
        found.append([accumulated(fmt, frozen, same_batch, reshard) for fmt in (None, "fp8-e4m3")])
    return found


@pytest.mark.promise("FSDP2", "Gradients that ranks share keep their bits if they are reduced in FP8, also over several micro-batches.")
def test_gradients_reduced_in_fp8_train_as_those_that_fsdp_reduces():
    (same, frozen, own), _ = dist.run(reduced_both_ways, 2)
    for (losses, weights), (expected, expected_weights) in (same, frozen):
        assert losses == expected
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    (losses, _), (expected, _) = own
    assert losses[-2:] != expected[-2:]
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0.05)


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
