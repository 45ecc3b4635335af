"""Train a small Llama whose layers exchange FP8 as in COAT's precision flow, to see what that costs in loss.

COAT's flow has the input and output of every linear and non-linear layer in FP8: one scale per tensor for linear layers, one per 16
channels for non-linear ones (page of the project, "Mixed Granularity FP8 Precision Flow"). msamp exchanges BF16 between layers and only
saves FP8, so the flow is emulated: each tensor is rounded to E4M3 and back where the flow has it in FP8, and arithmetic is done in FP32, or
on a GPU in BF16. Its speed cannot be measured this way.

Gradients pass the roundings of the forward unchanged; linear layers round the gradient of their output to E5M2. Weights and AdamW's states
are FP32 in all flows, so that only the flow differs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msamp.nn.saved_activations import IN_GROUPS
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.tensor import ScalingTensor
from tools.reproduce.trainings import Loop, pieces

HEAD = 32
Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Flow:
    """What layers exchange.

    Attributes:
        gemms: linear layers multiply FP8 inputs and weights, and FP8 gradients of their output; else BF16.
        layers: norms, attention and SwiGLU take and return FP8 too; else BF16.
        residual: so are the sums of the residual stream.
    """

    gemms: bool = False
    layers: bool = False
    residual: bool = False


FLOWS: Mapping[str, Flow] = MappingProxyType(
    {
        "bf16": Flow(),
        "FP8 GEMMs": Flow(gemms=True),
        "FP8 flow": Flow(gemms=True, layers=True, residual=True),
        "FP8 flow, residual stream in BF16": Flow(gemms=True, layers=True),
    }
)


class _Rounded(torch.autograd.Function):
    """Rounds in forward; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:  # type: ignore[override]
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GradRounded(torch.autograd.Function):
    """Passes forward unchanged; rounds the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:  # type: ignore[override]
        ctx.rounding = rounding
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.rounding(grad), None


def bf16(x: Tensor) -> Tensor:
    """Round to BF16, in the dtype of `x`."""
    return x.bfloat16().to(x.dtype)


def by_tensor(fmt: Format) -> Rounding:
    """Return the rounding to an FP8 format with one scale per tensor."""
    return lambda x: ScalingTensor.quantize(x, fmt).dequantize(x.dtype)


def in_groups(x: Tensor) -> Tensor:
    """Round to E4M3 with a scale for each 16 channels."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return IN_GROUPS.restore(IN_GROUPS.keep(rows), x.dtype).view(x.shape)


class Llama(nn.Module):
    """A Llama on bytes: layers of RMSNorm, attention and SwiGLU, learned positions, tied head; [b, s] -> [b, s, 256]."""

    def __init__(self, loop: Loop, flow: Flow) -> None:
        super().__init__()
        width, inner = loop.width, loop.width * 8 // 3 // 16 * 16
        self.flow, self.heads, self.layers = flow, max(1, width // HEAD), loop.layers
        shapes = {"qkv": (3 * width, width), "out": (width, width), "gate_up": (2 * inner, width), "down": (width, inner)}
        self.linear = nn.ParameterDict(
            {f"{name}_{layer}": nn.Parameter(0.02 * torch.randn(shape)) for layer in range(loop.layers) for name, shape in shapes.items()}
        )
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2 * loop.layers + 1))
        self.embedding = nn.Parameter(0.02 * torch.randn(256, width))
        self.positions = nn.Parameter(0.02 * torch.randn(loop.length, width))

    def between(self, x: Tensor) -> Tensor:
        """Round what a non-linear layer takes or returns."""
        return _Rounded.apply(x, in_groups if self.flow.layers else bf16)

    def added(self, x: Tensor) -> Tensor:
        """Round a sum of the residual stream."""
        return _Rounded.apply(x, in_groups if self.flow.residual else bf16)

    def product(self, x: Tensor, name: str) -> Tensor:
        """Multiply with a linear layer's weight."""
        weight = self.linear[name]
        if not self.flow.gemms:
            return self.between(F.linear(_Rounded.apply(x, bf16), _Rounded.apply(weight, bf16)))
        y = F.linear(_Rounded.apply(x, by_tensor(E4M3)), _Rounded.apply(weight, by_tensor(E4M3)))
        return self.between(_GradRounded.apply(y, by_tensor(E5M2)))

    def normed(self, x: Tensor, number: int) -> Tensor:
        """RMSNorm of a sum of the residual stream, which is rounded already."""
        return F.rms_norm(x, x.shape[-1:], self.norms[number].to(x.dtype), 1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next byte."""
        x = self.added(self.embedding[tokens] + self.positions)
        for layer in range(self.layers):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in self.product(self.normed(x, 2 * layer), f"qkv_{layer}").chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = self.added(x + self.product(self.between(mixed), f"out_{layer}"))
            gate, up = self.product(self.normed(x, 2 * layer + 1), f"gate_up_{layer}").chunk(2, -1)
            x = self.added(x + self.product(self.between(F.silu(gate) * up), f"down_{layer}"))
        return F.linear(self.normed(x, 2 * self.layers), self.embedding)


def train(flow: Flow, loop: Loop, text: Tensor, seed: int, every: int = 10) -> Iterator[tuple[int, float]]:
    """Train on the first 19 twentieths of a text.

    Args:
        text: bytes, uint8.

    Yields:
        (step, mean training loss since the last one), and last (steps, validation loss on the rest), in nats per byte.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = Llama(loop, flow).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.lr, betas=(0.9, 0.95), weight_decay=0.1)
    cut, losses = len(text) * 19 // 20, []

    def loss_of(tokens: Tensor) -> Tensor:
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

    for step, tokens in enumerate(pieces(text[:cut], loop, loop.steps, seed), 1):
        for group in optimizer.param_groups:
            group["lr"] = loop.lr_at(step)
        loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % every == 0:
            yield step, float(torch.stack(losses).mean())
            losses = []
    with torch.no_grad():
        valid = [float(loss_of(tokens)) for tokens in pieces(text[cut:], loop, 16, 0)]
    yield loop.steps, sum(valid) / len(valid)
