"""Compare attention in FP8 and BF16 on one GPU: time of forward, and of forward and backward, and FP8's error in output and gradients.

    python tools/bench/bench_attention.py                                        2,048, 8,192 and 32,768 tokens, heads of 128
    python tools/bench/bench_attention.py --shapes 2x32x8192x128/8               batch x heads x tokens x channels / query groups
    python tools/bench/bench_attention.py --inputs normal channel-outlier

Attention is causal. BF16 is PyTorch's cuDNN kernel. `kernel` is the attention alone; `layer` is what a fused layer runs: the rotary
embedding before it, the casts, and the FP8 input of the projection after it, in both layouts that the GEMMs require. Each is a CUDA graph,
to exclude the host, and the L2 cache is overwritten before every launch. SQNR in dB and slopes are relative to BF16's attention on the same
BF16 inputs, with just-in-time scales: the output's slope over the last eighth of the tokens, where most keys are summed, and dV's over the
first eighth, where most queries are; dK and dV without the first token. Measurements are appended to --csv.
"""

import argparse
import functools
import json
import math
import re
import statistics
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
from msamp.kernels import ops, scalar_pool
from msamp.nn.attention_block import split_heads
from msamp.nn.cast_scales import CastScales
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize
from msamp.numerics.recipe import O3
from tools.bench import rows
from tools.bench.bench_kernels import BF16, E4M3, E5M2, WARM_UP, captured, times

SHAPES = ("4x16x2048x128", "1x32x8192x128", "1x32x32768x128")
INPUTS = ("normal", "channel-outlier", "mean", "sink")
MEANS = {"mean": (1.0, 0.25), "sink": (0.5, 0.05)}
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


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one process: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    with sdpa_kernel(BACKENDS["auto"], set_priority=True):  # the trainer's order
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query.shape[2] != key.shape[2])
    return o.permute(2, 0, 1, 3).flatten(2)


def add_sink(grouped: Tensor, weight: float, size: float) -> None:
    """Give the first key about this weight for the last queries, and its value `size` times the mean norm of the others, in place.

    `grouped` is [s, b, groups, queries of a group + 2, d].
    """
    s, d = grouped.shape[0], grouped.shape[-1]
    query, key, value = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
    query += 1.0
    key -= key.mean(-1, keepdim=True)
    key[0] = (math.log(s) + 0.5 + math.log(weight / (1 - weight))) / math.sqrt(d)
    value[0] *= size * value[1:].norm(dim=-1).mean() / value[0].norm(dim=-1, keepdim=True)


class BenchAttention:
    """Both attentions of one shape on the same packed projection.

    Args:
        size: the sizes.
        kind: "normal"; "channel-outlier": every 32nd channel 50 times as large; "mean": values with a mean of one deviation, and their
            output's gradient of a quarter; "sink": the first token has nine tenths of the weight and a fifth of the others' norm in its
            value, and the means are half a deviation and a twentieth. Queries and keys have root mean square 1, but for the sink's.
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
        grad = torch.randn(s, b, size.heads * size.channels, device=self.device, generator=generator)
        if kind in MEANS:
            of_value, of_grad = MEANS[kind]
            grouped = qkv.view(s, b, size.groups, -1, size.channels)
            grouped[..., -1, :] += of_value * torch.randn(size.groups, size.channels, device=self.device, generator=generator)
            grad += of_grad * torch.randn(grad.shape[-1], device=self.device, generator=generator)
            if kind == "sink":
                add_sink(grouped, 0.9, 0.2)
        self.qkv, self.grad = qkv.to(BF16), grad.to(BF16)
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

    def prepare(self) -> None:
        """Run steps until every scale is delayed, and store the operands of `fp8_kernel`."""
        state = ScalingState(self.scaling)
        for _ in range(WARM_UP):
            self.fp8_layer(backward=True)
            state.roll()
        of = self.fp8.rotate(self.qkv, self.cos, self.sin, self.size.heads, self.size.groups)
        self.cast = of, self.fp8.prepare(of, self.fp8.attend(of), self.grad)

    def bf16_kernel(self, *, backward: bool, qkv: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the output [s, b, heads * d], and with `backward` the gradients of query, key and value."""
        heads = split_heads(self.qkv if qkv is None else qkv, self.size.heads, self.size.groups)
        parts = [x.detach().requires_grad_() for x in heads]
        out = attention(*parts)
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
        """Run the attention kernels on operands that are already cast."""
        of, prepared = self.cast
        self.fp8.attend(of)
        if backward:
            self.fp8.prepared_gradients(of, prepared)

    def fp8_layer(self, *, backward: bool) -> None:
        fp8, scale_inv = self.fp8, scalar_pool.take(self.device)
        of = fp8.rotate(self.qkv, self.cos, self.sin, self.size.heads, self.size.groups)
        attended = fp8.attend(of)
        fp8.output(of, attended, E4M3, CastScales(self.one, self.one, self.slot), scale_inv)
        if backward:
            prepared = fp8.prepare(of, attended, self.grad, scale_inv)
            ops.transpose(prepared.codes.flatten(0, 1).flatten(1))
            dq, dk, dv, scale_invs, sink = fp8.prepared_gradients(of, prepared)
            ds, first = (None, None) if sink is None else sink
            ops.rotary_backward(dq, dk, dv, self.cos, self.sin, self.one, self.slot, E5M2, scale_invs=scale_invs, ds=ds, sink=first)

    def losses(self) -> dict[str, float]:
        """Return the SQNR in dB and the slope of FP8's output and gradients relative to BF16's, without rotary embedding."""
        out, *gradients = self.bf16_kernel(backward=True)
        fresh = FP8Attention(AttentionScaling(O3.gemm, device=self.device), self.fp8.softmax_scale, True, False)  # type: ignore[arg-type]
        of = fresh.rotate(self.qkv, self.cos[:, :0], self.sin[:, :0], self.size.heads, self.size.groups)
        attended = fresh.attend(of)
        scale_inv = torch.zeros_like(self.one)
        output = fresh.output(of, attended, E4M3, CastScales(None, None, None), scale_inv)
        *parts, scale_invs, sink = fresh.gradients(of, attended, self.grad)
        if scale_invs is not None:
            parts = [dequantize(x, of_x) for x, of_x in zip(parts, scale_invs, strict=True)]
        assert sink is not None
        got = dict(zip(("dq", "dk", "dv"), sink.add_to(*parts), strict=True)) | {"o": dequantize(output, scale_inv).flatten(2)}
        want = dict(zip(("o", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        s = self.size.tokens
        slopes = {"o": slice(s - s // 8, None), "dk": slice(1, None), "dv": slice(1, s // 8)}
        sqnrs = {f"sqnr_{n}": round(sqnr_db(x[n in ("dk", "dv") :], got[n][n in ("dk", "dv") :]), 1) for n, x in want.items()}
        return sqnrs | {
            f"slope_{n}": round(slope(x[slopes.get(n, slice(None))], got[n][slopes.get(n, slice(None))]), 4) for n, x in want.items()
        }


def slope(want: Tensor, got: Tensor) -> float:
    """Return the factor of `want` that is nearest to `got`."""
    a, b = want.double().flatten(), got.double().flatten()
    return float(a @ b / (a @ a))


def cases(size: Shape, kind: str, device: torch.device | str = "cuda") -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield the cases of one shape and kind of input: the columns that describe a case, and the function that runs it."""
    both = BenchAttention(size, kind, device)
    lost = both.losses()
    nothing = dict.fromkeys(lost, "")
    both.prepare()
    for what, bf16, fp8 in (("kernel", both.bf16_kernel, both.fp8_kernel), ("layer", both.bf16_layer, both.fp8_layer)):
        for name, run, columns in (("bf16", bf16, nothing), ("fp8", fp8, lost)):
            for passes in PASSES:
                case = {"what": what, "precision": name, "pass": passes} | columns
                yield case, functools.partial(run, backward=passes == PASSES[1])


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
                seconds = times(captured(run), options.repeats)
                row = size._asdict() | {"inputs": kind} | columns | rows.percentile_columns("us", seconds, 1e6, 1)
                row["tflops"] = round(flops(size, columns["pass"]) / statistics.median(seconds) / 1e12)
                print(json.dumps(row), flush=True)
                rows.append(options.csv, [where | row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
