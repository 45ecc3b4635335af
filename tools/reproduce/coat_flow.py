"""Train a small Llama in the precision flow of COAT's published code, to see what that costs in loss.

The code that COAT's authors published (NVlabs/COAT, its Llama) keeps the residual stream, the outputs of linear layers, rotary embeddings
and attention in BF16. In E4M3 are: a copy of the residual stream as a norm reads it, gate and up as SwiGLU reads them, and SiLU's output,
with one scale per 16 channels; the outputs of norms and of SwiGLU and attention, as linear layers read them, and weights, with one scale
per tensor. A gradient that enters a GEMM is E5M2 with one scale per tensor. All scales map the amax to the format's largest value.

msamp exchanges BF16 between layers, so the flow is emulated: each tensor is rounded where the flow has it in FP8, and arithmetic is done in
FP32, or on a GPU in BF16. Its speed cannot be measured this way. Gradients pass the roundings of the forward unchanged. Weights and
AdamW's states are FP32 in all cases, so that only the flow differs.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msamp.nn.saved_activations import IN_EXACT_GROUPS
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.scaling import SMALLEST
from tools.reproduce.trainings import Loop, pieces

HEAD = 32
Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Flow:
    """What is in FP8.

    Attributes:
        weights, inputs: the operands of linear layers; else BF16.
        gradients: of the output of linear layers; else BF16.
        layers: what norms and SwiGLU read, and SiLU's output; else BF16.
    """

    weights: bool = False
    inputs: bool = False
    gradients: bool = False
    layers: bool = False


FLOWS: Mapping[str, Flow] = {
    "bf16": Flow(),
    "FP8 flow": Flow(weights=True, inputs=True, gradients=True, layers=True),
    "FP8 GEMMs": Flow(weights=True, inputs=True, gradients=True),
    "FP8 operands": Flow(weights=True, inputs=True),
    "FP8 weights": Flow(weights=True),
    "FP8 gradients": Flow(gradients=True),
}


class _Rounded(torch.autograd.Function):
    """Rounds the values in forward and the gradient in backward, each by a function, or not at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Rounding | None, gradient: Rounding | None) -> Tensor:  # type: ignore[override]
        ctx.gradient = gradient
        return x.view_as(x) if values is None else values(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad if ctx.gradient is None else ctx.gradient(grad), None, None


def bf16(x: Tensor) -> Tensor:
    """Round to BF16, in the dtype of `x`."""
    return x.bfloat16().to(x.dtype)


def by_tensor(fmt: Format) -> Rounding:
    """Return the rounding to an FP8 format with the scale amax / largest value."""

    def rounded(x: Tensor) -> Tensor:
        # As `Exact` and `ops.cast`, in half as many launches, which bound the speed of this loop.
        wide = x.float()
        scale_inv = (wide.abs().amax() / fmt.max).clamp(min=SMALLEST)
        return ((wide * scale_inv.reciprocal()).to(fmt.dtype).float() * scale_inv).to(x.dtype)

    return rounded


def in_groups(x: Tensor) -> Tensor:
    """Round to E4M3 with the scale amax / 448 for each 16 channels."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return IN_EXACT_GROUPS.restore(IN_EXACT_GROUPS.keep(rows), x.dtype).view(x.shape)


TENSOR, GRADIENT = by_tensor(E4M3), by_tensor(E5M2)


@functools.cache
def tables(length: int, half: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary embeddings, [length, half]."""
    angles = torch.outer(torch.arange(length, device=device), 10000.0 ** (-torch.arange(half, device=device) / half))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor) -> Tensor:
    """Apply rotary embeddings to [.., s, d]."""
    (cos, sin), (a, b) = tables(x.shape[-2], x.shape[-1] // 2, x.device, x.dtype), x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    """A Llama on bytes: layers of RMSNorm, attention and SwiGLU, tied head; [b, s] -> [b, s, 256].

    Args:
        rotary: rotary embeddings and heads of 64 channels, and weights that write to the residual stream start 1 / sqrt(2 layers) as large,
            as in a Llama of 125M parameters; else learned positions and heads of 32.
    """

    def __init__(self, loop: Loop, flow: Flow, *, rotary: bool = False) -> None:
        super().__init__()
        width, inner = loop.width, loop.width * 8 // 3 // 16 * 16
        self.flow, self.heads, self.layers, self.rotary = flow, max(1, width // (HEAD * (1 + rotary))), loop.layers, rotary
        shapes = {"qkv": (3 * width, width), "out": (width, width), "gate_up": (2 * inner, width), "down": (width, inner)}
        std = {name: 0.02 / ((2 * loop.layers) ** 0.5 if rotary and name in ("out", "down") else 1) for name in shapes}
        self.linear = nn.ParameterDict(
            {
                f"{name}_{layer}": nn.Parameter(std[name] * torch.randn(shape))
                for layer in range(loop.layers)
                for name, shape in shapes.items()
            }
        )
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2 * loop.layers + 1))
        self.embedding = nn.Parameter(0.02 * torch.randn(256, width))
        if not rotary:
            self.positions = nn.Parameter(0.02 * torch.randn(loop.length, width))

    def product(self, x: Tensor, name: str) -> Tensor:
        """Multiply with a linear layer's weight; the output is BF16."""
        operands = [(x, self.flow.inputs), (self.linear[name], self.flow.weights)]
        y = F.linear(*(_Rounded.apply(operand, TENSOR if fp8 else bf16, None) for operand, fp8 in operands))
        return _Rounded.apply(y, bf16, GRADIENT if self.flow.gradients else None)  # type: ignore[no-any-return]

    def read(self, x: Tensor) -> Tensor:
        """Return what a norm or SwiGLU reads."""
        return _Rounded.apply(x, in_groups, None) if self.flow.layers else x  # type: ignore[no-any-return]

    def normed(self, x: Tensor, number: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[number].to(x.dtype), 1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next byte."""
        x = _Rounded.apply(self.embedding[tokens] if self.rotary else self.embedding[tokens] + self.positions, bf16, None)
        for layer in range(self.layers):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in self.product(self.normed(self.read(x), 2 * layer), f"qkv_{layer}").chunk(3, -1)
            )
            q, k = (rotated(q), rotated(k)) if self.rotary else (q, k)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = _Rounded.apply(x + self.product(mixed, f"out_{layer}"), bf16, None)
            gate, up = self.product(self.normed(self.read(x), 2 * layer + 1), f"gate_up_{layer}").chunk(2, -1)
            swiglu = self.read(F.silu(self.read(gate))) * self.read(up)
            x = _Rounded.apply(x + self.product(swiglu, f"down_{layer}"), bf16, None)
        return F.linear(self.normed(x, 2 * self.layers), self.embedding)


def train(flow: Flow, loop: Loop, text: Tensor, seed: int, every: int = 10) -> Iterator[tuple[int, float]]:
    """Train on the first 19 twentieths of a text, uint8 bytes.

    Yields:
        (step, mean training loss since the last one), and last (steps, validation loss on the rest), in nats per byte.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = Llama(loop, flow, rotary=True).to(device)
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
