"""Compare the experts of a mixture of experts on one GPU, ours in FP8 with torch's in BF16 and torchao's in FP8.

A layer goes from the router to the weighted sum, forward and backward.

    python tools/bench/bench_experts.py                         OLMoE, Qwen3-30B-A3B and Mixtral, 8,192 tokens
    python tools/bench/bench_experts.py --models olmoe

BF16 is torch's `grouped_mm` under torch.compile, with groups padded to 8 rows, which its backward requires. torchao (pip install torchao)
is the same layer with its `_quantize_then_scaled_grouped_mm`: FP8 with a scale per row, groups padded to 16 rows; without the package the
case is left out. Tokens, router and choices are the same for all. Each is a CUDA graph, to exclude the host. Our FP8 weights are cast once
per step, which has a separate row; torchao casts them in every forward and backward. Peak memory is measured in one run, without weights
and inputs. Measurements are appended to --csv.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.kernels import ops
from msamp.nn.cast_scales import CastScales
from msamp.nn.experts import ExpertSettings, ExpertsFunction, ExpertWeights
from msamp.numerics.recipe import O2
from tools.bench import rows
from tools.bench.bench_kernels import BF16, E4M3, captured, columns, times


class Shape(NamedTuple):
    """A layer of SwiGLU experts, hidden -> 2 x width -> hidden, and the tokens that are sent to them."""

    model: str
    experts: int
    top_k: int
    hidden: int
    width: int
    tokens: int = 8192


MODELS = {
    "olmoe": Shape("OLMoE", 64, 8, 2048, 1024),
    "qwen3": Shape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "mixtral": Shape("Mixtral", 8, 2, 4096, 14336),
}
BF16_ALIGNMENT = 8  # rows of 16 bytes, which torch's grouped weight gradient requires
FP8_ALIGNMENT = 16  # the same in FP8

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows sorted by expert [rows, inputs], weights [experts, inputs, outputs], end of each expert's rows) -> [rows, outputs]."""


def torch_bf16(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply by torch's grouped product."""
    return torch._grouped_mm(x, weight, offs=offsets)


def torchao_fp8() -> GroupedMM:
    """Return torchao's FP8 product, which casts both operands with a scale per row.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.prototype import moe_training

    names = ("_to_fp8_rowwise_then_scaled_grouped_mm", "_quantize_then_scaled_grouped_mm")  # of torchao 0.18, of 0.16
    return next(getattr(moe_training, name) for name in names if hasattr(moe_training, name))  # type: ignore[no-any-return]


def grouped_layer(x: Tensor, probs: Tensor, experts: Tensor, fc1: Tensor, fc2: Tensor, alignment: int, multiply: GroupedMM) -> Tensor:
    """Run SwiGLU experts by two grouped products, in plain torch for torch.compile.

    Args:
        x: tokens [tokens, hidden]
        probs, experts: the weights and experts of each token, [tokens, top-k]
        fc1, fc2: [experts, 2 x width, hidden], gate above up, and [experts, hidden, width]
        alignment: each expert's rows are padded to a multiple of it
        multiply: the grouped product
    """
    offsets, source, places = ops.group_tokens(experts, fc1.shape[0], alignment)
    chosen = source.clamp(min=0)
    permuted = torch.where((source >= 0)[:, None], x[chosen // experts.shape[1]], 0)
    weights = torch.where(source >= 0, probs.flatten()[chosen], 0)
    gate, up = multiply(permuted, fc1.transpose(1, 2), offsets).chunk(2, 1)
    activated = (F.silu(gate.float()) * up.float() * weights[:, None]).to(BF16)
    out = multiply(activated, fc2.transpose(1, 2), offsets)
    return out[places.flatten()].view(*places.shape, -1).float().sum(1).to(BF16)


class Experts:
    """All versions of one layer on the same tokens, weights and router."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.top_k, self.count, hidden, width = shape.top_k, shape.experts, shape.hidden, shape.width
        generator = torch.Generator(device=device).manual_seed(0)

        def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.x, self.grad = new(shape.tokens, hidden).requires_grad_(), new(shape.tokens, hidden)
        self.router = (new(self.count, hidden) / hidden**0.5).requires_grad_()
        self.fc1 = (new(self.count, 2 * width, hidden) / hidden**0.5).requires_grad_()
        self.fc2 = (new(self.count, hidden, width) / width**0.5).requires_grad_()
        self.one, self.ones = torch.ones((), device=device), torch.ones(self.count, device=device)
        slot = CastScales(self.one * 16, self.one / 16, torch.zeros((), device=device))
        assert O2.gemm is not None
        self.settings = ExpertSettings(O2.gemm, *self.cast(), slot, slot, slot, slot)

    def cast(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Cast both weights, as once per step."""
        first, second = (ExpertWeights(*ops.expert_cast(w.detach(), self.ones, E4M3)) for w in (self.fc1, self.fc2))
        return first, second

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return FP32 probabilities and experts, [tokens, top-k]."""
        probs, experts = F.linear(x, self.router).float().softmax(-1).topk(self.top_k)
        return probs, experts

    def fp8(self, x: Tensor) -> Tensor:
        """Run the FP8 layer."""
        probs, experts = self.route(x)
        return ExpertsFunction.apply(x, probs, experts, self.fc1, self.fc2, self.settings)  # type: ignore[no-any-return]

    def plain(self, alignment: int, multiply: GroupedMM) -> Callable[[Tensor], Tensor]:
        """Return the layer in plain torch, for torch.compile."""
        return lambda x: grouped_layer(x, *self.route(x), self.fc1, self.fc2, alignment, multiply)

    def both_ways(self, layer: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Return forward and backward of a layer."""
        inputs = (self.x, self.router, self.fc1, self.fc2)
        return lambda: torch.autograd.grad(layer(self.x), inputs, self.grad)

    def cases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (name, function to run)."""
        yield "FP8, forward", lambda: self.fp8(self.x.detach())
        yield "FP8, forward and backward", self.both_ways(self.fp8)
        yield "FP8, casts of the weights", self.cast
        yield "BF16, forward and backward", self.compiled(BF16_ALIGNMENT, torch_bf16)
        if importlib.util.find_spec("torchao"):
            try:
                torchao = self.compiled(FP8_ALIGNMENT, torchao_fp8())
            except Exception as error:  # it does not load together with some versions of Triton
                torchao = functools.partial(_fail, error)
            yield "torchao FP8, forward and backward", torchao

    def compiled(self, alignment: int, multiply: GroupedMM) -> Callable[[], tuple[Tensor, ...]]:
        """Return forward and backward of the layer in plain torch; on a GPU by torch.compile."""
        layer = self.plain(alignment, multiply)
        return self.both_ways(torch.compile(layer, dynamic=False) if self.x.is_cuda else layer)


def _fail(error: Exception) -> tuple[Tensor, ...]:
    raise error


def peak(run: Callable[[], Any]) -> float:
    """Return the GiB that a run adds to what is allocated."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(name: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case of a model; a case that fails has an error."""
    experts = Experts(MODELS[name])
    for case, run in experts.cases():
        row: dict[str, Any] = {"model": MODELS[name].model, "case": case}
        row |= dict.fromkeys(("us_p20", "us", "us_p80", "peak_gib", "error"), "")
        try:
            row["peak_gib"] = round(peak(run), 2)
            row |= columns(rows.percentiles(times(captured(run), repeats)))
        except Exception as error:
            row["error"] = rows.failure(error)
        yield row


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=count(2), default=15)
    rows.add_flags(parser, "experts.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; layers are measured on a GPU")
    where = rows.machine(options.commit)
    for name in options.models:
        for row in measure(name, options.repeats):
            print(json.dumps(row), flush=True)
            rows.append(options.csv, [where | row])
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
