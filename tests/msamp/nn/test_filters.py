"""`msamp.initialize(smooth_swiglu=True)`: which layers get channel scales, in one's own loop, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import msamp
from helpers.fsdp_nets import everything
from msamp.nn.transformer_block import TransformerBlock


class Gated(nn.Module):
    """An MLP as Llama's."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj, self.act_fn = nn.Linear(96, 64, bias=False), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def trained(model: nn.Module, shape: tuple[int, ...], steps: int = 18, **options) -> tuple[nn.Module, list[float]]:
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2", accept=everything, **options)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("kind", ["block", "gated"])
def test_channels_get_scales_and_the_loss_stays(kind):
    torch.manual_seed(0)
    plain = TransformerBlock(64, 4, 96) if kind == "block" else Gated(nn.SiLU())
    shape = (8, 2, 64) if kind == "block" else (32, 64)
    model, smooth = trained(copy.deepcopy(plain), shape, smooth_swiglu=True)
    scaling = (model.fc2 if kind == "block" else model.down_proj).scaling
    assert scaling.channels.features == 96
    assert float(scaling.channels.peak.max()) > 0
    assert len([module for module in model.modules() if getattr(module, "channels", None) is not None]) == 1
    without, losses = trained(plain, shape)
    assert smooth == pytest.approx(losses, rel=0.02)
    state = model.state_dict()
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    assert torch.equal((other.fc2 if kind == "block" else other.down_proj).scaling.channels.peak, scaling.channels.peak)
    assert not [name for name in msamp.plain_state_dict(model) if "channels" in name]
    assert without is not model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(64, 64)), {}, r"\(none found\); leave it out"),
        (Gated(nn.GELU()), {}, r"\(none found\); leave it out"),
        (Gated(nn.SiLU()), {"accept": lambda name, layer: name != "down_proj"}, "1 found, none of them in FP8: widen `accept`"),
        (Gated(nn.SiLU()), {"recipe": "bf16"}, "applies to FP8 linear layers, and recipe 'bf16' has none"),
        (Gated(nn.SiLU()), {"fp8_recipe": "blockwise"}, "Smooth-SwiGLU requires operands with one delayed scale per tensor"),
    ],
)
def test_refused_before_anything_is_converted(model, options, message):
    with pytest.raises(ValueError, match=message):
        msamp.initialize(model, **{"recipe": "O2", "accept": everything} | options, smooth_swiglu=True)
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))
