"""FSDP2 with FP8 weights: torch's `fully_shard` over a prepared model trains as one process does."""

import dist
import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import msamp
from msamp.integrations import fsdp
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.states import local

STEPS = 5
WINDOW = 2  # of delayed scaling: both of its phases are seen


def everything(name: str, layer: nn.Linear) -> bool:
    return True


class Net(nn.Module):
    """Blocks whose rows two ranks share equally, unequally, and so that one has none."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)), nn.Linear(64, 33)])
        self.head = nn.Linear(33, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recipe(level: str) -> msamp.recipes.Recipe:
    return by_name(level).with_scaling(Delayed(window=WINDOW))


def batch(step: int, share: slice = slice(None), dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step + 2))[share].to(dtype)
    return x, torch.tanh(x[:, :1])


def wanting(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(level: str, dtype: torch.dtype = torch.float32, clip_grad: float | None = None, **options):
    model = fsdp.prepare(Net(dtype=dtype), recipe(level), accept=everything)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, fsdp.optimizer(model, wanting(model), recipe(level), clip_grad=clip_grad)


def train(model, optimizer, steps, share=slice(None), dtype=torch.float32) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, share, dtype)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def one_process(level: str, dtype: torch.dtype, clip_grad: float | None = None):
    model = Net(dtype=dtype)
    model, optimizer = msamp.initialize(model, wanting(model), recipe(level), accept=everything, clip_grad=clip_grad)
    losses = train(model, optimizer, range(STEPS), dtype=dtype)
    return losses, model.state_dict(), optimizer.state_dict()


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, ScalingTensor) == isinstance(b, ScalingTensor) and torch.equal(a, b)


def trained_alike(level: str, dtype: torch.dtype, clip_grad: float):
    """Every rank has the same batch, so that the average is each one's gradient and nothing may differ."""
    model, optimizer = sharded(level, dtype, clip_grad)
    losses = train(model, optimizer, range(STEPS), dtype=dtype)
    return losses, fsdp.model_state(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O2", torch.bfloat16)])
def test_sharded_training_has_the_bits_of_one_process(level, dtype):
    (losses, weights, states), (again, *_) = dist.run(trained_alike, 2, level, dtype, 0.5)
    expected, expected_weights, packed = one_process(level, dtype, 0.5)
    assert losses == again == expected
    assert same(weights, dict(expected_weights))
    assert same(states, packed["state"])
