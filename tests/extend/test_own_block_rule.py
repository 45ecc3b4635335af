"""A scale rule of blocks that no source file knows: half of the format stays free above each block's maximum.

A rule is a class below `msamp.scaling.Scaling`; a recipe names it next to a granularity of blocks. Without a kernel of its own the layer
follows the definition in plain torch.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import msamp

E4M3, Block, Cast, scale_from_amax = msamp.formats.E4M3, msamp.granularity.Block, msamp.recipes.Cast, msamp.scaling.scale_from_amax
pytestmark = pytest.mark.filterwarnings("ignore:there is no kernel for operands of granularity")


@dataclass(frozen=True)
class Headroom(msamp.scaling.Scaling):
    """The largest power of two that brings twice the block's maximum into the format."""

    window: int = 0

    def next_scale(self, history: torch.Tensor, fp_max: float, last: torch.Tensor | float = 1.0) -> torch.Tensor:
        return scale_from_amax(2 * history[..., -1], fp_max, last)


ROW, SQUARE = Cast(E4M3, Headroom(), Block(1, 128)), Cast(E4M3, Headroom(), Block(128, 128))
RECIPE = replace(msamp.recipes.O2, name="own-blocks", gemm=msamp.recipes.Gemms.of(input=ROW, weight=SQUARE, grad_output=ROW))


@pytest.fixture(autouse=True)
def known() -> None:
    msamp.recipes.register(RECIPE)


def cast(x: torch.Tensor, block: Block) -> torch.Tensor:
    """`x` as the rule rounds it, written down a second time."""
    scale = scale_from_amax(2 * block.maxima(x), E4M3.max)
    spread = block.spread(scale, x.shape)
    return (x * spread).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float() / spread


def trained(recipe: str) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256))
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe=recipe)
    x, losses = torch.randn(64, 256), []
    for _ in range(15):
        loss = (model(x) - x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


def test_a_layer_multiplies_operands_cast_by_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    model, _ = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe=RECIPE.name)
    x = torch.randn(32, 256) * torch.logspace(-3, 3, 32).unsqueeze(1)
    expected = cast(x, Block(1, 128)) @ cast(msamp.fp32_values(model[0].weight), Block(128, 128)).t()
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=0)


def test_a_model_trains_with_it_and_prints_it():
    model, losses = trained(RECIPE.name)
    assert "Headroom" in str(model)
    assert losses[-1] < 0.8 * losses[0]
    assert losses != trained("O2")[1]
