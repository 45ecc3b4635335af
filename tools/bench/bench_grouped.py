"""Measure grouped GEMMs of mixtures of experts on one GPU: ours in FP8, torch's in BF16 and FP8, and dense FP8 with the same FLOPs.

    python tools/bench/bench_grouped.py                                    four models, both layers, equal and unequal loads
    python tools/bench/bench_grouped.py --models olmoe --loads balanced

Rows of the operands are sorted by expert. `balanced` gives every expert the same number, `zipf` the k-th expert a share proportional to
1/k with every tenth expert empty, in multiples of 16 since torch's kernels require it, and `ragged` the same in any number (ours only).
Each run is a CUDA graph, to exclude the host, and the L2 cache is overwritten before every launch. A kernel that fails is reported in its
row. Measurements are appended to --csv.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from msamp.kernels.reference.group_tokens import row_capacity
from msamp.kernels.reference.grouped_mm import GROUP_ALIGNMENT
from tools.bench import rows
from tools.bench.bench_kernels import captured, columns, times

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
PRODUCTS = ("forward", "grad_input", "grad_weight")
LOADS = ("balanced", "zipf", "ragged")


class Layer(NamedTuple):
    """One expert layer: all rows that its experts multiply, inputs and outputs."""

    model: str
    name: str
    experts: int
    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> float:
        """FLOPs of each of the three products."""
        return 2.0 * self.rows * self.inputs * self.outputs


def model(name: str, experts: int, expert_rows: int, hidden: int, width: int) -> tuple[Layer, Layer]:
    """Both layers of a SwiGLU expert: hidden -> 2 x width, and width -> hidden."""
    return Layer(name, "fc1", experts, expert_rows, hidden, 2 * width), Layer(name, "fc2", experts, expert_rows, width, hidden)


MODELS = {
    "olmoe": model("OLMoE", 64, 65536, 2048, 1024),
    "qwen3": model("Qwen3-30B-A3B", 128, 65536, 2048, 768),
    "mixtral": model("Mixtral", 8, 16384, 4096, 14336),
    "deepseek": model("DeepSeek-V2-Lite", 64, 49152, 2048, 1408),
}


def counts(layer: Layer, load: str) -> list[int]:
    """Return the rows of every expert."""
    if load == "balanced":
        return [(layer.rows * (e + 1)) // layer.experts - (layer.rows * e) // layer.experts for e in range(layer.experts)]
    shares = [0.0 if e % 10 == 9 or (layer.experts < 10 and e == layer.experts - 1) else 1.0 / (e + 1) for e in range(layer.experts)]
    unit = 16 if load == "zipf" else 1
    sizes = [int(layer.rows * share / sum(shares)) // unit * unit for share in shares]
    sizes[0] += layer.rows - sum(sizes)
    generator = torch.Generator().manual_seed(0)
    return [sizes[i] for i in torch.randperm(layer.experts, generator=generator).tolist()]


class Operands:
    """Random operands of one layer: in BF16 for torch, and in FP8 and both layouts for us, where every group is padded with rows of zeros
    to a multiple of 128 and the buffer has room for any load, as the device must assume."""

    def __init__(self, layer: Layer, load: str, device: str = "cuda", sizes: Sequence[int] = ()) -> None:
        self.layer, self.sizes = layer, list(sizes) or counts(layer, load)
        self.capacity = row_capacity(layer.rows, layer.experts, GROUP_ALIGNMENT)
        self.offsets, self.padded = (
            torch.tensor([-(-size // unit) * unit for size in self.sizes], device=device).cumsum(0).to(torch.int32)
            for unit in (1, GROUP_ALIGNMENT)
        )
        new = functools.partial(torch.randn, device=device, dtype=BF16)
        self.x, self.grad = new(layer.rows, layer.inputs), new(layer.rows, layer.outputs)
        self.weight = new(layer.experts, layer.outputs, layer.inputs)
        self.x8, self.grad8, self.weight8 = self.spread(self.x.to(E4M3)), self.spread(self.grad.to(E5M2)), self.weight.to(E4M3)
        self.x8_t, self.grad8_t = self.x8.t().contiguous(), self.grad8.t().contiguous()
        self.weight8_t = self.weight8.transpose(1, 2).contiguous()
        self.one = torch.ones((), device=device)
        self.ones = torch.ones(layer.experts, device=device)

    def spread(self, x: Tensor) -> Tensor:
        """Return rows of `x` at their places in the padded buffer."""
        out = torch.zeros((self.capacity, x.shape[1]), dtype=torch.uint8, device=x.device)
        sizes = torch.tensor(self.sizes, device=x.device)
        shift = torch.cat([self.padded.new_zeros(1), self.padded[:-1] - self.offsets[:-1]]).long()
        places = torch.arange(x.shape[0], device=x.device) + shift.repeat_interleave(sizes)
        return out.index_copy_(0, places, x.view(torch.uint8)).view(x.dtype)

    def ours(self, product: str, fast: bool, out_dtype: torch.dtype = BF16) -> Tensor:
        """Run our kernel."""
        one, ones, offsets = self.one, self.ones, self.padded
        if product == "forward":
            return ops.grouped_mm(self.x8, self.weight8, offsets, one, ones, out_dtype, fast_accum=fast)
        if product == "grad_input":
            return ops.grouped_mm(self.grad8, self.weight8_t, offsets, one, ones, out_dtype, fast_accum=fast)
        return ops.grouped_mm_grad_weight(self.grad8_t, self.x8_t, offsets, one, one, out_dtype, fast_accum=fast, aligned=True)

    def cases(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """Yield (kernel, product, function to run)."""
        grouped, scaled = torch._grouped_mm, torch._scaled_grouped_mm
        x, grad, weight, offs, layer = self.x, self.grad, self.weight, self.offsets, self.layer
        yield "torch BF16", "forward", lambda: grouped(x, weight.transpose(1, 2), offs=offs)
        yield "torch BF16", "grad_input", lambda: grouped(grad, weight, offs=offs)
        yield "torch BF16", "grad_weight", lambda: grouped(grad.t(), x, offs=offs)
        new = functools.partial(torch.ones, device=offs.device)
        by_row, by_input, by_output = new(layer.rows), new(layer.experts, layer.inputs), new(layer.experts, layer.outputs)
        x8, g8 = x.to(E4M3), grad.to(E4M3)  # torch's kernel refuses E5M2
        x8_t, g8_t = x8.t().contiguous(), g8.t().contiguous()

        def torch_fp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
            return scaled(a, b, a_scale, b_scale, offs=offs, out_dtype=BF16, use_fast_accum=fast)

        forward = x8, self.weight8.transpose(1, 2), by_row, by_output
        yield "torch FP8 fast", "forward", lambda: torch_fp8(*forward, True)
        yield "torch FP8 full", "forward", lambda: torch_fp8(*forward, False)
        yield "torch FP8 full", "grad_input", lambda: torch_fp8(g8, self.weight8_t.transpose(1, 2), by_row, by_input, False)
        flat = by_output.flatten(), by_input.flatten()
        yield "torch FP8 full", "grad_weight", lambda: torch_fp8(g8_t, x8_t.t(), *flat, False)
        one, w, w_t = self.one, self.weight8[0], self.weight8_t[0]
        yield "dense FP8", "forward", lambda: ops.scaled_mm(x8, w, one, one, None, BF16, fast_accum=True)
        yield "dense FP8", "grad_input", lambda: ops.scaled_mm(g8, w_t, one, one, None, BF16, fast_accum=False)
        yield "dense FP8", "grad_weight", lambda: ops.scaled_mm(g8_t, x8_t, one, one, None, BF16, fast_accum=False)
        yield from self.own_cases()

    def own_cases(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """Yield ours: forward with fast accumulation, gradients with full, as the recipes do."""
        for product in PRODUCTS:
            fast = product == "forward"
            yield f"ours {'fast' if fast else 'full'}", product, functools.partial(self.ours, product, fast)


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return percentiles of the seconds of `run` in a CUDA graph."""
    return rows.percentiles(times(captured(run), repeats))


def failure(error: Exception) -> str:
    """Return an error in a few words."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def measure(layer: Layer, load: str, repeats: int) -> list[dict[str, Any]]:
    """Time every kernel on one layer and load."""
    operands = Operands(layer, load)
    table: list[dict[str, Any]] = []
    bf16: dict[str, float] = {}
    for kernel, product, run in operands.cases() if load != "ragged" else operands.own_cases():
        row: dict[str, Any] = {"model": layer.model, "layer": layer.name, "load": load, "product": product, "kernel": kernel}
        row |= dict.fromkeys(("us_p20", "us", "us_p80", "tflops", "over_bf16", "error"), "")
        try:
            seconds = timed(run, repeats)
        except Exception as error:
            row["error"] = failure(error)
        else:
            if kernel == "torch BF16":
                bf16[product] = seconds[1]
            row |= columns(seconds) | {"tflops": round(layer.flops / seconds[1] / 1e12)}
            row["over_bf16"] = round(bf16[product] / seconds[1], 3) if product in bf16 else ""
        table.append(row)
    return table


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=["balanced", "zipf"])
    parser.add_argument("--repeats", type=count(2), default=15)
    rows.add_flags(parser, "grouped.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; kernels are measured on a GPU")
    where = rows.machine(options.commit)
    for layer in (layer for name in options.models for layer in MODELS[name]):
        for load in options.loads:
            table = measure(layer, load, options.repeats)
            torch.cuda.empty_cache()
            print(f"{layer.model} {layer.name} {load} M={layer.rows} K={layer.inputs} N={layer.outputs} E={layer.experts}: us (x BF16)")
            for product in PRODUCTS:
                cells = [f"{row['kernel']} {row['us'] or row['error']} ({row['over_bf16']})" for row in table if row["product"] == product]
                print(f"  {product}: {', '.join(cells)}", flush=True)
            rows.append(options.csv, [where | row for row in table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
