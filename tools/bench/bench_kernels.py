"""Measure each kernel separately on one GPU, relative to the bandwidth or FLOP rate that the GPU reaches in the same run.

    python tools/bench/bench_kernels.py                               shapes of GPT-1.3B, micro-batch 4
    python tools/bench/bench_kernels.py --tokens 4096 --hidden 4096   of GPT-7B, micro-batch 2
    python tools/bench/bench_kernels.py --only linear                 one layer in FP8 and in BF16, 2,048 and 8,192 wide

`share` is relative to the roofline: bytes that must move / time / the measured copy bandwidth, or for matrix kernels FLOPs / time / the
measured rate of a large BF16 GEMM. The L2 cache is overwritten before every launch. Measurements are appended to --csv.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import O3
from tools.bench import rows

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
CACHE = 256 * 2**20  # bytes written before a launch, several times the L2
WARM_UP = 17  # delayed scaling is just in time for 16 steps


class Case(NamedTuple):
    """One kernel: the function to run, and the bytes it must move or the FLOPs it must compute."""

    name: str
    run: Callable[[], Any]
    bytes: float = 0
    flops: float = 0


def times(run: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` launches, with a cold L2."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(3):
        run()
    for start, end in marks:
        cache.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def ceilings(repeats: int) -> tuple[float, float]:
    """Return (bytes/s of a large copy, counting reads and writes; FLOP/s of a large BF16 GEMM on random values)."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(times(lambda: target.copy_(source), repeats))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    gemm = statistics.median(times(lambda: a @ b.t(), repeats))
    return 2 * source.numel() / copy, 2 * 8192**3 / gemm


def elementwise(tokens: int, hidden: int, device: str = "cuda") -> Iterator[Case]:
    """Casts, norms, activations and the rotary embedding; 4 x hidden is the MLP's width, 128 a head's."""
    ffn, heads = 4 * hidden, hidden // 128
    new = functools.partial(torch.randn, device=device, dtype=BF16)
    x, delta, wide, grad_wide = new(tokens, hidden), new(tokens, hidden), new(tokens, ffn), new(tokens, ffn)
    weight, bias, scale = new(hidden), new(hidden), torch.ones((), device=device)
    slot = torch.zeros((), device=device)
    small, large = tokens * hidden, tokens * ffn
    yield Case("cast", lambda: ops.cast(x, scale, E4M3), 3 * small)
    yield Case("cast, row", lambda: ops.cast_transpose(x, scale, slot, E4M3, row=True), 3 * small)
    yield Case("cast, transposed", lambda: ops.cast_transpose(x, scale, None, E4M3, col=True), 3 * small)
    all_three = functools.partial(ops.cast_transpose, x, scale, slot, E5M2, row=True, col=True, colsum=True)
    yield Case("cast + transpose + column sums", all_three, 4 * small)
    payload = torch.randint(0, 120, (ffn, hidden), dtype=torch.uint8, device=device).view(E4M3)
    yield Case("transpose of an FP8 weight", lambda: ops.transpose(payload), 2 * hidden * ffn)
    normalize = functools.partial(ops.normalize, x, None, weight, bias, 1e-5, scale, slot, E4M3, rms=False)
    yield Case("norm", normalize, 3 * small)
    add_norm = functools.partial(ops.normalize, x, delta, weight, bias, 1e-5, scale, slot, E4M3, rms=False)
    yield Case("residual add + norm", add_norm, 7 * small)
    _, _, scale_inv, mean, rstd = normalize()
    again = functools.partial(ops.normalize_transposed, x, mean, rstd, weight, bias, scale_inv, E4M3, rms=False)
    yield Case("norm again, transposed", again, 3 * small)
    parts = [new(-(-tokens // 64), width, dtype=torch.float32) for width in (3 * hidden, hidden, ffn, hidden)]
    size = sum(4 * part.numel() + 2 * part.shape[1] for part in parts)
    yield Case("column sums of a layer, added up", lambda: ops.sum_parts(parts, BF16), size)
    yield Case("norm backward + residual", lambda: ops.normalize_backward(delta, x, mean, rstd, weight, delta, rms=False), 8 * small)
    yield Case("GELU", lambda: ops.activate(wide, "gelu", scale, slot, E4M3), 3 * large)
    backward = functools.partial(ops.activate_backward, grad_wide, wide, "gelu", scale, E4M3, scale, slot, E5M2, colsum=True)
    yield Case("GELU backward + GELU again", backward, 7 * large)
    yield Case("SwiGLU", lambda: ops.activate(wide, "swiglu", scale, slot, E4M3), 2.5 * large)
    half = grad_wide[:, : ffn // 2].contiguous()
    backward = functools.partial(ops.activate_backward, half, wide, "swiglu", scale, E4M3, scale, slot, E5M2)
    yield Case("SwiGLU backward + SwiGLU again", backward, 5.5 * large)
    sequence = min(tokens, 2048)
    angles = torch.rand(sequence, 128, device=device)
    qkv = new(sequence, tokens // sequence, 3 * hidden)
    rotary = functools.partial(ops.rotary_, qkv, angles.cos(), angles.sin(), heads, heads)
    yield Case("rotary embedding, in place", rotary, 8 * small)
    dq, dk, dv = (new(sequence, tokens // sequence, heads, 128) for _ in range(3))
    unrotate = functools.partial(ops.rotary_backward, dq, dk, dv, angles.cos(), angles.sin(), scale, slot, E5M2, colsum=True)
    yield Case("rotary embedding backward", unrotate, 12 * small)


def gemms(tokens: int, hidden: int) -> Iterator[Case]:
    """The three GEMMs of FC1 in FP8 and in BF16."""
    ffn = 4 * hidden
    flops = 2.0 * tokens * hidden * ffn
    one = torch.ones((), device="cuda")
    for name, m, n, k in (("output", tokens, ffn, hidden), ("grad_input", tokens, hidden, ffn), ("grad_weight", ffn, hidden, tokens)):
        a, b, fast = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda"), name == "output"
        run = functools.partial(ops.scaled_mm, a.to(E4M3 if fast else E5M2), b.to(E4M3), one, one, None, BF16, fast_accum=fast)
        yield Case(f"FP8 GEMM, {name}", run, flops=flops)
        a16, b16 = a.to(BF16), b.to(BF16)
        if name == "grad_weight":  # in BF16 both operands are stored by token
            a16, b16 = (x.t().contiguous().t() for x in (a16, b16))
        yield Case(f"BF16 GEMM, {name}", functools.partial(torch.mm, a16, b16.t()), flops=flops)


def linear_step(tokens: int, width: int, *, fp8: bool) -> Callable[[], None]:
    """Return forward and backward of a linear layer of `width` x `width`, in BF16, or in FP8 with its casts and delayed scales."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(tokens, width, device=device, dtype=BF16, requires_grad=True)
    grad = torch.randn(tokens, width, device=device, dtype=BF16)
    plain = nn.Linear(width, width, bias=False, device=device, dtype=BF16)
    layer = FP8Linear.from_linear(plain, O3) if fp8 else plain

    def both() -> None:
        layer(x).backward(grad)
        x.grad = layer.weight.grad = None

    if fp8:
        state = ScalingState(layer)
        for _ in range(WARM_UP):
            both()
            state.roll()
    return both


def linear(tokens: int) -> Iterator[Case]:
    """A single linear layer, forward and backward with its casts, in FP8 (delayed scaling) and in BF16: 2048 and 8192 wide."""
    for width in (2048, 8192):
        for name, fp8 in (("FP8", True), ("BF16", False)):
            run = captured(linear_step(tokens, width, fp8=fp8))
            yield Case(f"{name} linear, {width} x {width}", run, flops=6.0 * tokens * width * width)


def captured(run: Callable[[], Any], warm_up: int = 3) -> Callable[[], Any]:
    """Capture `run` as a CUDA graph, to time the GPU without the host; its replays return the result of `run`."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=count(1), default=8192)
    parser.add_argument("--hidden", type=count(1), default=2048)
    groups: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
        "elementwise": lambda o: elementwise(o.tokens, o.hidden),
        "gemm": lambda o: gemms(o.tokens, o.hidden),
        "linear": lambda o: linear(o.tokens),
    }
    parser.add_argument("--only", nargs="*", choices=list(groups), default=list(groups))
    parser.add_argument("--repeats", type=count(2), default=30)
    rows.add_flags(parser, "kernels.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; kernels are measured on a GPU")
    bandwidth, rate = ceilings(options.repeats)
    where = rows.machine(options.commit)
    for group in options.only:
        for case in groups[group](options):
            row = measure(case, options.repeats, bandwidth, rate)
            print(json.dumps(row), flush=True)
            rows.append(options.csv, [where | {"tokens": options.tokens, "hidden": options.hidden} | row])
    return 0


def measure(case: Case, repeats: int, bandwidth: float, rate: float) -> dict[str, Any]:
    """Measure one row: microseconds, bytes/s or FLOP/s, and their share of the ceiling."""
    seconds = times(case.run, repeats)
    middle = statistics.median(seconds)
    reached, ceiling = (case.flops / middle, rate) if case.flops else (case.bytes / middle, bandwidth)
    return {
        "kernel": case.name,
        **rows.percentile_columns("us", seconds, 1e6, 1),
        "tb_s": "" if case.flops else round(reached / 1e12, 2),
        "tflops": round(reached / 1e12) if case.flops else "",
        "share": float(f"{reached / ceiling:.3g}"),  # close to 0 for a launch that moves little
    }


if __name__ == "__main__":
    sys.exit(main())
