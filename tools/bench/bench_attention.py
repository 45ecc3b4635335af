"""Compare attention in FP8 and BF16 on one GPU: time of forward, and of forward and backward, and FP8's error in output and gradients.

    python tools/bench/bench_attention.py                                        2,048, 8,192 and 32,768 tokens, heads of 128
    python tools/bench/bench_attention.py --shapes 2x32x8192x128/8               batch x heads x tokens x channels / query groups
    python tools/bench/bench_attention.py --inputs normal channel-outlier

Attention is causal. BF16 is PyTorch's cuDNN kernel. `kernel` is the attention alone; `layer` is what a fused layer runs: the rotary
embedding before it, the casts, and the FP8 input of the projection after it, in both layouts that the GEMMs require. Each is a CUDA graph,
to exclude the host, and the L2 cache is overwritten before every launch. SQNR in dB is relative to BF16's attention on the same BF16
inputs, with just-in-time scales. Measurements are appended to --csv.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.model.attention import BACKENDS
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from msamp.kernels.reference.fp8_attention import AttentionScales
from msamp.nn.attention_block import split_heads
from msamp.nn.fp8_attention import DP, GRAD, AttentionScaling, FP8Attention, O
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize
from msamp.numerics.recipe import O3
from tools.bench import rows
from tools.bench.bench_kernels import WARM_UP, captured, times

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
SHAPES = ("4x16x2048x128", "1x32x8192x128", "1x32x32768x128")
INPUTS = ("normal", "channel-outlier")
PASSES = ("forward", "forward and backward")


class Shape(NamedTuple):
    """Sizes of an attention."""

    batch: int
    heads: int
    tokens: int
    channels: int
    groups: int


def shape(text: str) -> Shape:
    """`4x16x2048x128` or `1x32x8192x128/8`, as the `type` of an argument."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(?:/(\d+))?", text)
    if match is None or "0" in match.groups():
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: give BATCHxHEADSxTOKENSxCHANNELS, followed by /GROUPS for shared keys")
    batch, heads, tokens, channels = (int(word) for word in match.groups()[:4])
    groups = int(match[5] or heads)
    if heads % groups:
        raise argparse.ArgumentTypeError(f"{text!r} has {heads} heads in {groups} groups: give a divisor of the heads")
    return Shape(batch, heads, tokens, channels, groups)


class BenchAttention:
    """Both attentions of one shape on the same packed projection.

    Args:
        size: the sizes.
        kind: "normal", or "channel-outlier": every 32nd channel 50 times as large; queries and keys have root mean square 1.
        device: a CPU computes the reference definition.
    """

    def __init__(self, size: Shape, kind: str, device: torch.device | str = "cuda") -> None:
        self.size, self.device = size, torch.device(device)
        s, b, width = size.tokens, size.batch, (size.heads + 2 * size.groups) * size.channels
        generator = torch.Generator(device=self.device).manual_seed(0)
        qkv = torch.randn(s, b, width, device=self.device, generator=generator)
        if kind == "channel-outlier":
            qkv[..., ::32] *= 50.0
            qkv /= qkv.square().mean().sqrt()
        self.qkv = qkv.to(BF16)
        self.grad = torch.randn(s, b, size.heads * size.channels, device=self.device, generator=generator).to(BF16)
        steps = torch.arange(s, device=self.device)[:, None] / 1e4 ** (
            torch.arange(0, size.channels, 2, device=self.device) / size.channels
        )
        angles = torch.cat((steps, steps), -1)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.scaling = AttentionScaling(O3.gemm, device=self.device)  # type: ignore[arg-type]
        self.one, self.slot = torch.ones((), device=self.device), torch.zeros((), device=self.device)

    @property
    def fp8(self) -> FP8Attention:
        return FP8Attention(self.scaling, 1 / math.sqrt(self.size.channels), True, True)

    def fill_windows(self) -> None:
        """Run steps until every scale is delayed."""
        state = ScalingState(self.scaling)
        for _ in range(WARM_UP):
            self.fp8_layer(backward=True)
            state.roll()

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        parts = split_heads(qkv, self.size.heads, self.size.groups)
        return tuple(x.detach().requires_grad_() for x in parts)

    def bf16_kernel(self, *, backward: bool, qkv: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the output [s, b, heads * d], and with `backward` the gradients of query, key and value."""
        parts = self._parts(self.qkv if qkv is None else qkv)
        q, k, v = (x.permute(1, 2, 0, 3) for x in parts)
        with sdpa_kernel(BACKENDS["auto"], set_priority=True):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.size.heads != self.size.groups)
        out = out.permute(2, 0, 1, 3).flatten(2)
        return (out, *torch.autograd.grad(out, parts, self.grad)) if backward else (out,)

    def bf16_layer(self, *, backward: bool) -> None:
        qkv = self.qkv.clone()  # a layer rotates the GEMM's output in place; the copy is not part of it and is small compared with the rest
        ops.rotary_(qkv, self.cos, self.sin, self.size.heads, self.size.groups)
        out, *gradients = self.bf16_kernel(backward=backward, qkv=qkv)
        wide = out.detach().flatten(0, 1)
        ops.cast_transpose(wide, self.one, self.slot, E4M3, row=True)
        if backward:
            ops.cast_transposed(wide, self.one, E4M3)
            dq, dk, dv = gradients
            ops.rotary_backward(dq, dk, dv, self.cos, self.sin, self.one, self.slot, E5M2)

    def fp8_kernel(self, *, backward: bool) -> None:
        """Run the attention on operands that are already cast."""
        of, grad, given = self.cast
        attended = self.fp8.attend(of)
        if backward:
            self.fp8.backward(of, attended, grad, given, causal=True)

    def keep_casts(self) -> None:
        """Store the operands of `fp8_kernel`, once every scale is delayed."""
        fp8, scaling = self.fp8, self.scaling
        of = fp8.rotate(self.qkv, self.cos, self.sin, self.size.heads, self.size.groups)
        grad, of_grad = fp8.cast_one(self.grad.view(of.query.shape), GRAD)
        given = AttentionScales(of.scale_invs, scaling.scale_inv[O], of_grad, scaling.scale[DP:], scaling.scale_inv[DP])
        self.cast = of, grad, given

    def fp8_layer(self, *, backward: bool) -> None:
        fp8 = self.fp8
        of = fp8.rotate(self.qkv, self.cos, self.sin, self.size.heads, self.size.groups)
        attended = fp8.attend(of)
        if backward:
            ops.transpose(attended.o.flatten(0, 1).flatten(1))
            dq, dk, dv, scale_invs = fp8.gradients(of, attended, self.grad)
            ops.rotary_backward(dq, dk, dv, self.cos, self.sin, self.one, self.slot, E5M2, scale_invs=scale_invs)

    def losses(self) -> dict[str, float]:
        """Return the SQNR in dB of FP8's output and gradients relative to BF16's, without rotary embedding."""
        out, *gradients = self.bf16_kernel(backward=True)
        fresh = FP8Attention(AttentionScaling(O3.gemm, device=self.device), self.fp8.softmax_scale, True, False)  # type: ignore[arg-type]
        of = fresh.rotate(self.qkv, self.cos[:, :0], self.sin[:, :0], self.size.heads, self.size.groups)
        attended = fresh.attend(of)
        *fp8_gradients, scale_invs = fresh.gradients(of, attended, self.grad)
        assert scale_invs is not None
        sqnrs = {"sqnr_o": sqnr_db(out.detach(), dequantize(attended.o, attended.o_scale_inv, torch.float32).flatten(2))}
        for name, want, got, scale_inv in zip("qkv", gradients, fp8_gradients, scale_invs, strict=True):
            sqnrs[f"sqnr_d{name}"] = sqnr_db(want, dequantize(got, scale_inv, torch.float32))
        return {name: round(value, 1) for name, value in sqnrs.items()}


def cases(size: Shape, kind: str, device: torch.device | str = "cuda") -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield the cases of one shape and kind of input: the columns that describe a case, and the function that runs it."""
    attention = BenchAttention(size, kind, device)
    lost = attention.losses()
    nothing = dict.fromkeys(lost, "")
    attention.fill_windows()
    attention.keep_casts()
    for what, bf16, fp8 in (
        ("kernel", attention.bf16_kernel, attention.fp8_kernel),
        ("layer", attention.bf16_layer, attention.fp8_layer),
    ):
        for name, run, columns in (("bf16", bf16, nothing), ("fp8", fp8, lost)):
            for passes in PASSES:

                def go(run: Callable[..., Any] = run, backward: bool = passes == PASSES[1]) -> None:
                    run(backward=backward)

                yield {"what": what, "precision": name, "pass": passes} | columns, go


def flops(size: Shape, passes: str) -> float:
    """Return the FLOPs of the matrix products, half of which a causal mask skips."""
    forward = 2.0 * size.batch * size.heads * size.tokens**2 * size.channels
    return forward * (1.0 if passes == PASSES[0] else 3.5)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape, default=[shape(text) for text in SHAPES], metavar="SHAPE")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=["normal"])
    parser.add_argument("--repeats", type=count(2), default=20)
    rows.add_flags(parser, "attention.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; attention is measured on a GPU")
    where = rows.machine(options.commit)
    for size in options.shapes:
        for kind in options.inputs:
            for columns, run in cases(size, kind):
                low, median, high = rows.percentiles(times(captured(run), options.repeats))
                microseconds = {name: round(value * 1e6, 1) for name, value in (("us_p20", low), ("us", median), ("us_p80", high))}
                row = (
                    size._asdict()
                    | {"inputs": kind}
                    | columns
                    | microseconds
                    | {"tflops": round(flops(size, columns["pass"]) / median / 1e12)}
                )
                print(json.dumps(row), flush=True)
                rows.append(options.csv, [where | row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
