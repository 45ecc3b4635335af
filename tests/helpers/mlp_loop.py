"""A small MLP that learns what another network computes, in an ordinary loop of PyTorch."""

import torch
from torch import nn


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))


def batches(steps: int, device="cpu", seed=1):
    """Inputs and what a fixed small network makes of them."""
    torch.manual_seed(100)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(128, 64, generator=generator)
        yield x.to(device), teacher(x).detach().to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device="cpu", seed=1, dtype=torch.float32) -> torch.Tensor:
    """Losses [steps] of an ordinary loop, clipping by torch's own function."""
    losses = []
    for x, y in batches(steps, device, seed):
        loss = (model(x.to(dtype)).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def adamw(model: nn.Module, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 2e-3, **options})
