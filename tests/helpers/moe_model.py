"""A small model with a router and experts, for tests of what trains, saves and shards them."""

import torch
from torch import nn

import msamp

HIDDEN, WIDTH, EXPERTS = 32, 48, 4
KEEP = msamp.filters.all_of(msamp.filters.min_features(16), msamp.filters.exclude_names("router"))


class Mixture(nn.Module):
    """x [tokens, 16] -> [tokens, 16]: a linear layer, experts of top-2 beside a residual, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 16)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = msamp.Experts(EXPERTS, HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        probs, chosen = self.router(h).float().softmax(-1).topk(2)
        return self.down(h + self.experts(h, probs, chosen))


def batch(seed: int = 1, tokens: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))
    return x, x.roll(1, 1).sin()


def initialized(recipe: str = "O2", **options) -> tuple[Mixture, torch.optim.Optimizer]:
    model = Mixture()
    if recipe.startswith(("bf16-", "collage")):
        model.bfloat16()
    options.setdefault("accept", KEEP)
    return msamp.initialize(model, torch.optim.AdamW(model.named_parameters(), lr=3e-3), recipe, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> float:
    """Return the last loss."""
    x, target = batch(seed)
    x = x.to(next(model.parameters()).dtype)
    for _ in range(steps):
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
