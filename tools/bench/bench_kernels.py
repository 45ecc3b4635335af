"""Measure each kernel separately on one GPU, relative to the bandwidth or FLOP rate that the GPU reaches in the same run.

    python tools/bench/bench_kernels.py                               shapes of GPT-1.3B, micro-batch 4
    python tools/bench/bench_kernels.py --tokens 4096 --hidden 4096   of GPT-7B, micro-batch 2
    python tools/bench/bench_kernels.py --only linear attention
    python tools/bench/bench_kernels.py --only just-in-time           the gain of an amax in two stages (COAT's Group Scaling)
    python tools/bench/bench_kernels.py --only update                 only the optimizers' kernels; bench_optimizer.py measures whole steps

`share` is relative to the roofline: bytes that must move / time / the measured copy bandwidth, or for matrix kernels FLOPs / time / the
measured rate of a large BF16 GEMM. The L2 cache is overwritten before every launch. Measurements are appended to --csv.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.model.attention import BACKENDS
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from msamp.kernels.reference.adamw import Batch, Hyper, hyper_numbers
from msamp.kernels.tables import Tables
from msamp.nn import saved_activations
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import formats, recipe
from msamp.numerics.formats import COAT_E4M3, Format
from msamp.numerics.range_expand import Expanded
from msamp.numerics.recipe import O3, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.states import as_stored
from msamp.optim.states import begun as begun_state
from msamp.optim.updates import MASTER, format_names
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


def columns(seconds: Sequence[float]) -> dict[str, float]:
    """Return the columns of the 20th, 50th and 80th percentile, in microseconds."""
    return {name: round(value * 1e6, 1) for name, value in zip(("us_p20", "us", "us_p80"), seconds, strict=True)}


def ceilings(repeats: int) -> tuple[float, float]:
    """Return (bytes/s of a large copy, counting reads and writes; FLOP/s of a large BF16 GEMM on random values)."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = rows.percentiles(times(lambda: target.copy_(source), repeats))[1]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    gemm = rows.percentiles(times(lambda: a @ b.t(), repeats))[1]
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
    yield Case(
        "cast + transpose + column sums", lambda: ops.cast_transpose(x, scale, slot, E5M2, row=True, col=True, colsum=True), 4 * small
    )
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


def grouped(tokens: int, hidden: int, device: str = "cuda") -> Iterator[Case]:
    """COAT's activations: casts to FP8 with an exponent byte per group of channels, and back."""
    x, size = torch.randn(tokens, hidden, device=device, dtype=BF16), saved_activations.IN_GROUPS.size
    element_bytes = BF16.itemsize + saved_activations.IN_GROUPS.element_bytes(BF16.itemsize)
    parts = ops.group_cast(x, size, E4M3)
    yield Case(f"cast, groups of {size}", lambda: ops.group_cast(x, size, E4M3), element_bytes * x.numel())
    yield Case(f"groups of {size} as BF16", lambda: ops.group_decode(*parts, size, BF16), element_bytes * x.numel())


def just_in_time(tokens: int, hidden: int, device: str = "cuda") -> Iterator[Case]:
    """Just-in-time casts of a gradient, in one stage and from the maxima that its producer stored; alone, and after the producer, whose
    output may still be in the cache. Bytes are those that each variant moves."""
    new = functools.partial(torch.randn, device=device)
    for width in (hidden, 4 * hidden):
        grad, x = new(tokens, width, dtype=BF16), new(tokens, width, dtype=BF16)
        mean, rstd, weight = new(tokens), torch.ones(tokens, device=device), new(width, dtype=BF16)
        produce = functools.partial(ops.normalize_backward, grad, x, mean, rstd, weight, grad, rms=False)
        cast = functools.partial(ops.cast_transpose, scale=None, amax_slot=None, dtype=E5M2, row=True, col=True, colsum=True)
        *_, maxima = produce(maxima=True)
        written = produce()[0]

        def both(two_stages: bool, produce: Callable[..., Any] = produce, cast: Callable[..., Any] = cast) -> Any:
            output, *_, maxima_left = produce(maxima=two_stages)
            return cast(output, maxima=maxima_left if two_stages else None)

        size = tokens * width
        yield Case(f"norm backward, {width} wide", produce, 8 * size)
        yield Case(f"norm backward with maxima, {width} wide", functools.partial(produce, maxima=True), 8 * size)
        yield Case(f"just-in-time cast, {width} wide", functools.partial(cast, written), 6 * size)
        yield Case(f"just-in-time cast by maxima, {width} wide", functools.partial(cast, written, maxima=maxima), 4 * size)
        yield Case(f"norm backward, just-in-time cast, {width} wide", functools.partial(both, False), 14 * size)
        yield Case(f"norm backward, just-in-time cast by maxima, {width} wide", functools.partial(both, True), 12 * size)


def gradients(hidden: int, device: str = "cuda") -> Iterator[Case]:
    """Operations of the optimizer and the exchange on the weights' gradients of four layers: amaxes, norms, the cast into one bucket."""
    gs = [torch.randn(shape, device=device, dtype=BF16) for shape in weights(hidden)]
    fp8, numels = [ScalingTensor.quantize(g, formats.E4M3) for g in gs], [g.numel() for g in gs]
    total, count, where = sum(numels), len(gs), torch.device(device)
    factors, units = torch.full((count,), 2.0**-3, dtype=torch.float64, device=device), [2**20] * count
    amaxes, scales = torch.ones(3 * count, device=device), torch.ones(count, device=device)
    yield Case("amaxes of BF16 gradients", functools.partial(ops.grad_stats, Tables(where), gs, squares=False), 2 * total)
    yield Case("norms of BF16 gradients", functools.partial(ops.grad_stats, Tables(where), gs, factors, units, squares=True), 2 * total)
    yield Case("amaxes and norms of E4M3 gradients", functools.partial(ops.grad_stats, Tables(where), fp8), total)
    yield Case("scales from amaxes", lambda: ops.scale_from_amax(amaxes, formats.E4M3.max, None, 1.0), 2 * amaxes.nbytes)
    spans = [(i, 0, n, first) for i, (n, first) in enumerate(zip(numels, itertools.accumulate(numels, initial=0), strict=False))]
    bucket = torch.empty(total, dtype=E4M3, device=device)
    yield Case("BF16 gradients into an E4M3 bucket", functools.partial(ops.pack, Tables(where), gs, spans, bucket, scales), 3 * total)


def weights(hidden: int) -> list[tuple[int, int]]:
    """Return the shapes of the linear weights of four layers."""
    return [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)] * 4


def update(hidden: int, device: str = "cuda") -> Iterator[Case]:
    """The optimizers' kernels on the weights of four layers: they read gradients, read and write states, and write weights that have a
    master."""
    shapes = weights(hidden)
    usable, one = torch.ones((), dtype=torch.bool, device=device), torch.ones((), device=device)
    numbers = torch.tensor(hyper_numbers(Hyper(1e-4, 0.9, 0.95, 1e-8, 0.1)), dtype=torch.float64, device=device)
    amaxes, kept = (torch.ones(rows_of, len(shapes), device=device) for rows_of in (5, 3))
    for of in (recipe.BF16, recipe.O2, O3):
        for name, kernel, moment in (("AdamW", ops.adamw, None), ("AdamW with COAT's moments", ops.coat_adamw, COAT_E4M3)):
            batch = batch_of(shapes, of.weight, of.with_states(m=moment, v=moment).states, device)
            run = functools.partial(kernel, Tables(usable.device), batch, numbers, amaxes, kept, one, usable, decoupled=True)
            yield Case(f"{name}, {of.name}", run, update_bytes(batch))
    for of in recipe.ALL:
        if of.states.update != "fp32":
            batch = batch_of(shapes, of.weight, of.states, device)
            run = functools.partial(ops.collage, Tables(usable.device), batch, numbers, of.states.update, one, usable)
            yield Case(f"Collage, {of.name}", run, update_bytes(batch))


def batch_of(shapes: Sequence[tuple[int, ...]], weight: Format, states: StateFormats, device: str) -> Batch:
    """Return random gradients and weights of these shapes and formats, with the states before the first step."""

    def stored(x: Tensor, fmt: Format) -> Tensor:
        return ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype)

    values = [torch.randn(shape, device=device) * 0.02 for shape in shapes]
    kept = [state for state in updates.by_name(states.update).states if state != MASTER]
    beside = {state.key: state.format_beside(weight, format_names(states)) for state in kept}
    places = list(range(len(shapes)))
    return Batch(
        grads=[stored(torch.randn_like(x) * 1e-4, states.grad) for x in values],
        masters=[stored(x, states.master) for x in values],
        weights=[] if weight == states.master else [stored(x, weight) for x in values],
        states={key: [as_stored(begun_state(key, fmt, x), key) for x in values] for key, fmt in beside.items() if fmt},
        steps=[torch.zeros((), device=device) for _ in shapes],
        indices=places,
        places=places,
    )


def update_bytes(batch: Batch) -> int:
    """Return the bytes that an update of these tensors must read and write."""

    def held(x: Tensor | Expanded) -> int:
        if isinstance(x, Expanded):
            return x.payload.nbytes + x.max.nbytes + x.k.nbytes
        return x.payload.nbytes if isinstance(x, ScalingTensor) else x.nbytes

    changed = (batch.masters, *batch.states.values())
    return sum(map(held, batch.grads + batch.weights)) + 2 * sum(held(x) for column in changed for x in column)


def loss(tokens: int) -> Iterator[Case]:
    """The cross entropy over 50,304 tokens; the gradient overwrites the logits."""
    columns = 50304
    logits = torch.randn(tokens // 4, columns, device="cuda", dtype=BF16)
    labels, weights = torch.randint(0, columns, (tokens // 4,), device="cuda"), torch.ones(tokens // 4, device="cuda")
    yield Case("cross entropy, in place", lambda: ops.cross_entropy_(logits, labels, weights), 4 * logits.numel())


def gemms(tokens: int, hidden: int) -> Iterator[Case]:
    """The three GEMMs of FC1 in FP8 and in BF16."""
    ffn = 4 * hidden
    flops = 2.0 * tokens * hidden * ffn
    one = torch.ones((), device="cuda")
    for name, m, n, k, fast in (("output", tokens, ffn, hidden, True), ("grad_input", tokens, hidden, ffn, False)):
        a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
        run = functools.partial(ops.scaled_mm, a.to(E4M3 if fast else E5M2), b.to(E4M3), one, one, None, BF16, fast_accum=fast)
        yield Case(f"FP8 GEMM, {name}", run, flops=flops)
        a16, b16 = a.to(BF16), b.to(BF16)
        yield Case(f"BF16 GEMM, {name}", functools.partial(torch.mm, a16, b16.t()), flops=flops)
    a, b = torch.randn(ffn, tokens, device="cuda"), torch.randn(hidden, tokens, device="cuda")
    yield Case(
        "FP8 GEMM, grad_weight",
        functools.partial(ops.scaled_mm, a.to(E5M2), b.to(E4M3), one, one, None, BF16, fast_accum=False),
        flops=flops,
    )
    a16, b16 = a.to(BF16).t().contiguous(), b.to(BF16).t().contiguous()
    yield Case("BF16 GEMM, grad_weight", functools.partial(torch.mm, a16.t(), b16), flops=flops)


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
            yield Case(
                f"{name} linear, {width} x {width}", captured(linear_step(tokens, width, fp8=fp8)), flops=6.0 * tokens * width * width
            )


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Capture `run` as a CUDA graph, to time the GPU without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def attention(tokens: int, hidden: int) -> Iterator[Case]:
    """Causal attention over heads of 128, on the strided views that the QKV projection produces, with every backend."""
    sequence, heads = 2048, hidden // 128
    batch = tokens // sequence
    flops = 2.0 * batch * heads * sequence**2 * 128
    for backend in ("cudnn", "flash"):
        qkv = torch.randn(sequence, batch, heads, 3, 128, device="cuda", dtype=BF16)
        q, k, v = (qkv.select(3, i).permute(1, 2, 0, 3).detach().requires_grad_() for i in range(3))

        def forward(backend: str = backend, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        yield Case(f"attention forward, {backend}", forward, flops=flops)
        grad = torch.randn_like(out)
        run = functools.partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        yield Case(f"attention backward, {backend}", run, flops=2.5 * flops)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=count(1), default=8192)
    parser.add_argument("--hidden", type=count(1), default=2048)
    groups: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
        "elementwise": lambda o: elementwise(o.tokens, o.hidden),
        "grouped": lambda o: grouped(o.tokens, o.hidden),
        "just-in-time": lambda o: just_in_time(o.tokens, o.hidden),
        "gradients": lambda o: gradients(o.hidden),
        "update": lambda o: update(o.hidden),
        "loss": lambda o: loss(o.tokens),
        "gemm": lambda o: gemms(o.tokens, o.hidden),
        "linear": lambda o: linear(o.tokens),
        "attention": lambda o: attention(o.tokens, o.hidden),
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
    seconds = rows.percentiles(times(case.run, repeats))
    reached, ceiling = (case.flops / seconds[1], rate) if case.flops else (case.bytes / seconds[1], bandwidth)
    return {
        "kernel": case.name,
        **columns(seconds),
        "tb_s": "" if case.flops else round(reached / 1e12, 2),
        "tflops": round(reached / 1e12) if case.flops else "",
        "share": float(f"{reached / ceiling:.3g}"),  # close to 0 for a launch that moves little
    }


if __name__ == "__main__":
    sys.exit(main())
