"""What a model of pictures has to do with the optimizer of `msamp.initialize`."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import msamp

PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def loss_of_pictures(model: nn.Module, step: int, rows: int) -> torch.Tensor:
    """As `host_loops` asks for it: other pictures in each step, and for each number of rows."""
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(10 * step + rows))
    return nn.functional.cross_entropy(model(pictures), torch.tensor([0, 1]))


def check_it_trains_saves_and_resumes(build: Callable[[], nn.Module], level: str, folder: Path) -> None:
    """Its loss falls; saved, it goes on bit for bit; its plain weights load into the model as it was.

    Args:
        build: the same model each time, of pictures of 32 x 32, with 32 classes.
        level: of the recipe.
        folder: for the file.
    """

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        return msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(PICTURES), torch.tensor([0, 1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = begin()
    first = train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
    plain = msamp.plain_state_dict(model, optimizer)
    after = train(model, optimizer, 3)
    assert after[-1] < first[0]
    resumed, other = begin()
    saved = torch.load(folder / "saved.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(resumed, other, 3) == after
    build().load_state_dict(plain, strict=True)
