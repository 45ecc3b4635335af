"""How much the host has to issue for an eager step of a loop of one's own: it is what a small layer's step takes."""

import pytest
import torch
from torch import nn

import msamp

MOST = 12  # a linear layer with bias: 3 casts and a GEMM each way, one more GEMM, the bias's sum; cuBLAS clears memory for some GEMMs


def events(depth: int, recipe: str) -> int:
    """Kernels, copies and fills of one step once its history is full."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(depth))).to("cuda", torch.bfloat16)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(each.device_type == torch.autograd.DeviceType.CUDA for each in seen.events())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["O1", "O2", "O3"])
def test_a_linear_layer_adds_few_launches_to_a_step(recipe):
    # A difference: what a step issues once, whatever the model, is not of the layers. Several kinds of state are updated in chunks.
    assert (events(24, recipe) - events(8, recipe)) / 16 <= MOST
