"""A way to save activations that no source file knows: BF16 for backward, whatever forward computes in.

Norms and activations take it as their argument `saved`; they ask for `keep`, `restore` and `element_bytes` only.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import msamp


class Halved:
    """The tensor in BF16: 2 bytes per element."""

    def element_bytes(self, wide: int) -> float:
        return 2

    def keep(self, x: Tensor) -> Sequence[Tensor]:
        return (x.bfloat16(),)

    def restore(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


LAYERS = {
    "LayerNorm": (lambda saved: msamp.LayerNorm(32, saved=saved), lambda: nn.LayerNorm(32)),
    "RMSNorm": (lambda saved: msamp.RMSNorm(32, 1e-5, saved=saved), lambda: nn.RMSNorm(32, eps=1e-5)),
    "GELU": (lambda saved: msamp.Activation("gelu", saved=saved), lambda: nn.GELU(approximate="tanh")),
}


def saved_bytes(layer: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The output, and the bytes of activations that backward keeps, without parameters and per-row statistics."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    return y, sum(t.nbytes for t in kept if t.numel() == x.numel())


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_what_it_says_and_computes_gradients_from_it(name: str):
    ours, torchs = LAYERS[name]
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer = ours(Halved())
    y, kept = saved_bytes(layer, x)
    assert kept == x.numel() * Halved().element_bytes(4)
    # Forward is exact; backward is that of the rounded input, up to the order of sums.
    assert torch.allclose(y, torchs()(x), rtol=1e-5, atol=1e-6)
    grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    (mine,) = torch.autograd.grad(y, x, grad)
    (exact,) = torch.autograd.grad(torchs()(x), x, grad)
    difference = (mine - exact).norm() / exact.norm()
    assert 0 < difference < 2**-7


def test_a_model_with_it_trains_at_o2():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), msamp.Activation("gelu", saved=Halved()), msamp.LayerNorm(64, saved=Halved()), nn.Linear(64, 32)
    )
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe="O2")
    x, losses = torch.randn(64, 32), []
    for _ in range(20):
        loss = (model(x) - x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
