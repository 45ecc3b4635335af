"""An MLP, column- then row-parallel over some ranks, as one process does it: all ranks' casts, GEMMs and sums, one after the other.

It shares no code with the library but the GEMM: scales are searched in FP64, casts are torch's own. The library has to agree to the bit.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from helpers.numerics import make
from msamp.kernels import ops
from msamp.nn.linear import scaling_parameter
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.metrics import saturation_frac
from msamp.numerics.recipe import by_name
from msamp.numerics.tensor import ScalingTensor

S, B, H, F = 32, 2, 64, 96  # sequence, batch, hidden and inner features


class Case(NamedTuple):
    """What is the same for the two layers of an MLP; `level` names a recipe."""

    level: str
    sp: bool
    wire: str
    saved: str
    dtype: torch.dtype
    kind: str = "normal"


def batch(case: Case, step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The whole input and grad_output of a step."""
    x, g = (make(case.kind, (S, B, H), 2 * step + i, device).to(case.dtype) for i in range(2))
    return x, g * 0.01


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """FP32 weight and bias of the first layer, weight of the second."""
    return make("normal", (F, H), 10) / H**0.5, make("normal", (F,), 11), make("normal", (H, F), 12) / F**0.5


def shards(case: Case, ranks: int, device: str = "cpu") -> list[tuple[nn.Parameter, Tensor, nn.Parameter]]:
    """By rank the parameters of the MLP, of an outer dtype that is the activations'."""
    first, bias, second = (w.to(device, case.dtype) for w in weights())
    parts = zip(first.chunk(ranks), bias.chunk(ranks), second.chunk(ranks, 1), strict=True)
    level = by_name(case.level)
    return [(scaling_parameter(w1, level), nn.Parameter(b.clone()), scaling_parameter(w2, level)) for w1, b, w2 in parts]


def scale_of(amax: float, limit: float) -> float:
    """The largest power of two with amax * scale <= limit."""
    scale = 2.0 ** math.floor(math.log2(limit / amax))
    return scale / 2 if amax * scale > limit else scale


def cast(x: Tensor, scale: float, fmt: Format) -> Tensor:
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)


class OneProcess:
    """All ranks of an MLP, one after the other."""

    def __init__(self, case: Case, ranks: int, device: str = "cpu") -> None:
        self.case, self.ranks, self.device = case, ranks, device
        self.scales: dict[str, float] = {}  # delayed ones, by tensor
        self.saturation = 0.0
        self.parts = shards(case, ranks, device)

    def quantize(self, name: str, parts: list[Tensor], fmt: Format, shared: bool) -> tuple[list[Tensor], list[Tensor]]:
        """By rank the payload and scale_inv."""
        amaxes = [float(part.abs().max()) for part in parts]
        now = [scale_of(max(amaxes) if shared else amax, fmt.max) for amax in amaxes]
        scales = [self.scales[name]] * self.ranks if name in self.scales else now
        self.next[name] = scale_of(max(amaxes), fmt.max)
        payloads = [cast(part, scale, fmt) for part, scale in zip(parts, scales, strict=True)]
        self.saturation = max(self.saturation, *(saturation_frac(p, fmt) for p in payloads))
        return payloads, [torch.tensor(1 / scale, device=self.device) for scale in scales]

    def total(self, name: str, parts: list[Tensor], fmt: Format | None) -> Tensor:
        """The sum, as the ranks hold it, one block after the other."""
        payloads, scale_inv = (parts, 1.0) if fmt is None else self.quantize(name, parts, fmt, True)
        total = functools.reduce(torch.add, [p.float() for p in payloads])
        if fmt is None:
            return total.to(self.case.dtype)
        if not self.case.sp:
            room = 2 ** math.ceil(math.log2(self.ranks))
            total = cast(total, 1 / room, fmt).float() * room
        return (total * scale_inv[0]).to(self.case.dtype)

    def weight(self, w: ScalingTensor) -> tuple[Tensor, Tensor, Tensor]:
        """FP8 payload, its transpose, and scale_inv."""
        if w.payload.dtype == E4M3.dtype:
            payload, scale_inv = w.payload, w.scale_inv
        else:
            values = w.dequantize(torch.float32)
            scale = scale_of(float(values.abs().max()), E4M3.max)
            payload, scale_inv = cast(values, scale, E4M3), torch.tensor(1 / scale, device=self.device)
        return payload, flip(payload), scale_inv

    def step(self, x: Tensor, g: Tensor) -> list[dict[str, Tensor]]:
        """What each rank finds."""
        self.next: dict[str, float] = {}
        case, dtype, sp = self.case, self.case.dtype, self.case.sp
        wire = E4M3 if case.wire == "fp8" else None
        ranks = range(self.ranks)
        rows = [[t.reshape(-1, H) for t in (whole.chunk(self.ranks) if sp else [whole] * self.ranks)] for whole in (x, g)]
        first, second = ([self.weight(part[i].detach()) for part in self.parts] for i in (0, 2))
        x8, x_inv = whole_operand(*self.quantize("x", rows[0], E4M3, True), sp)
        y = [
            ops.scaled_mm(x8, w, x_inv, inv, part[1].detach(), dtype, fast_accum=True)
            for (w, _, inv), part in zip(first, self.parts, strict=True)
        ]
        y = [part.requires_grad_() for part in y]
        inner = [gelu(part) for part in y]
        h8, h_inv = self.quantize("h", [part.detach() for part in inner], E4M3, False)
        partial = [ops.scaled_mm(h8[r], second[r][0], h_inv[r], second[r][2], None, dtype, fast_accum=True) for r in ranks]
        out = self.total("out", partial, wire)
        g8, g_inv = whole_operand(*self.quantize("g", rows[1], E5M2, True), sp)
        grad_w2 = [ops.scaled_mm(flip(g8), flip(h8[r]), g_inv, h_inv[r], None, dtype, fast_accum=False) for r in ranks]
        grad_inner = [ops.scaled_mm(g8, second[r][1], g_inv, second[r][2], None, dtype, fast_accum=False) for r in ranks]
        grad_y = [torch.autograd.grad(inner[r], y[r], grad_inner[r])[0] for r in ranks]
        y8, y_inv = self.quantize("grad_y", grad_y, E5M2, False)
        partial = [ops.scaled_mm(y8[r], first[r][1], y_inv[r], first[r][2], None, dtype, fast_accum=False) for r in ranks]
        grad_x = self.total("grad_x", partial, E5M2)
        self.scales = self.next
        return [
            {
                "output": mine_of(out, r, self.ranks, sp),
                "grad_input": mine_of(grad_x, r, self.ranks, sp),
                "grad_weight 1": ops.scaled_mm(flip(y8[r]), flip(x8), y_inv[r], x_inv, None, dtype, fast_accum=False).cpu(),
                "grad_weight 2": grad_w2[r].cpu(),
                "grad_bias": grad_y[r].sum(0, dtype=torch.float32).to(dtype).cpu(),
            }
            for r in ranks
        ]


def flip(payload: Tensor) -> Tensor:
    return payload.view(torch.uint8).t().contiguous().view(payload.dtype)


def whole_operand(payloads: list[Tensor], scale_invs: list[Tensor], sp: bool) -> tuple[Tensor, Tensor]:
    return (torch.cat([p.view(torch.uint8) for p in payloads]).view(payloads[0].dtype) if sp else payloads[0]), scale_invs[0]


def mine_of(rows: Tensor, rank: int, ranks: int, sp: bool) -> Tensor:
    return (rows.chunk(ranks)[rank] if sp else rows).reshape(-1, B, H).cpu()
