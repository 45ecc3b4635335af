"""Compare the experts of a mixture of experts in FP8 and BF16 on one GPU, from the router to the weighted sum, forward and backward.

    python tools/bench/bench_experts.py                         OLMoE, Qwen3-30B-A3B and Mixtral, 8,192 tokens
    python tools/bench/bench_experts.py --models olmoe --seconds 60

BF16 is torch's `grouped_mm` under torch.compile, with groups padded to 8 rows, which its backward requires. Tokens, router and choices are
the same for both. Each is a CUDA graph, to exclude the host. The FP8 weights are cast once per step, which has a row of its own. Peak
memory is that of one run, without weights and inputs. Measurements are appended to --csv.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file
from msamp.kernels import ops
from msamp.nn.cast_scales import CastScales
from msamp.nn.experts import ExpertSettings, ExpertsFunction, ExpertWeights
from msamp.numerics.recipe import O2
from tools.bench import rows
from tools.bench.bench_grouped import BF16, E4M3, MODELS, Layer, failure
from tools.bench.bench_kernels import captured, times

TOP_K = {"olmoe": 8, "qwen3": 8, "mixtral": 2}
BF16_ALIGNMENT = 8  # rows of 16 bytes, which torch's grouped weight gradient requires


class Experts:
    """Both versions of one layer on the same tokens, weights and router."""

    def __init__(self, fc1: Layer, fc2: Layer, top_k: int, device: str = "cuda") -> None:
        self.top_k, self.count = top_k, fc1.experts
        tokens, generator = fc1.rows // top_k, torch.Generator(device=device).manual_seed(0)

        def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        self.x, self.grad = new(tokens, fc1.inputs).requires_grad_(), new(tokens, fc1.inputs)
        self.router = (new(fc1.experts, fc1.inputs) / fc1.inputs**0.5).requires_grad_()
        self.fc1 = (new(fc1.experts, fc1.outputs, fc1.inputs) / fc1.inputs**0.5).requires_grad_()
        self.fc2 = (new(fc2.experts, fc2.outputs, fc2.inputs) / fc2.inputs**0.5).requires_grad_()
        self.one, self.ones = torch.ones((), device=device), torch.ones(fc1.experts, device=device)
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

    def bf16(self, x: Tensor) -> Tensor:
        """Run the BF16 layer, for torch.compile."""
        probs, experts = self.route(x)
        offsets, source, places = ops.group_tokens(experts, self.count, BF16_ALIGNMENT)
        chosen = source.clamp(min=0)
        permuted = torch.where((source >= 0)[:, None], x[chosen // self.top_k], 0)
        weights = torch.where(source >= 0, probs.flatten()[chosen], 0)
        gate, up = torch._grouped_mm(permuted, self.fc1.transpose(1, 2), offs=offsets).chunk(2, 1)
        activated = (F.silu(gate.float()) * up.float() * weights[:, None]).to(BF16)
        out = torch._grouped_mm(activated, self.fc2.transpose(1, 2), offs=offsets)
        return out[places.flatten()].view(*places.shape, -1).float().sum(1).to(BF16)

    def both_ways(self, layer: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Return forward and backward of a layer."""
        inputs = (self.x, self.router, self.fc1, self.fc2)
        return lambda: torch.autograd.grad(layer(self.x), inputs, self.grad)

    def cases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (name, function to run)."""
        yield "FP8, forward", lambda: self.fp8(self.x.detach())
        yield "FP8, forward and backward", self.both_ways(self.fp8)
        yield "FP8, casts of the weights", self.cast
        compiled = torch.compile(self.bf16, dynamic=False) if self.x.is_cuda else self.bf16
        yield "BF16, forward and backward", self.both_ways(compiled)


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
    experts = Experts(*MODELS[name], TOP_K[name])
    for case, run in experts.cases():
        row: dict[str, Any] = {"model": MODELS[name][0].model, "case": case} | dict.fromkeys(
            ("us_p20", "us", "us_p80", "peak_gib", "error"), ""
        )
        try:
            row["peak_gib"] = round(peak(run), 2)
            low, median, high = rows.percentiles(times(captured(run), repeats))
            row |= {"us_p20": round(low * 1e6, 1), "us": round(median * 1e6, 1), "us_p80": round(high * 1e6, 1)}
        except Exception as error:
            row["error"] = failure(error)
        yield row


def kinds(name: str) -> list[str]:
    """Return the time of each kind of kernel in one forward and backward of the FP8 layer, the longest first."""
    run = Experts(*MODELS[name], TOP_K[name])
    both = run.both_ways(run.fp8)
    both()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [f"{event.self_device_time_total:9.1f} us {event.count:3d} x {event.key[:60]}" for event in events[:14]]


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(TOP_K), default=list(TOP_K))
    parser.add_argument("--seconds", type=count(1), default=300, help="after which no model is begun")
    parser.add_argument("--repeats", type=count(2), default=15)
    parser.add_argument("--csv", type=output_file, default=rows.ROOT / "tools/bench/results/experts.csv")
    parser.add_argument("--commit", help="hash to record if this tree is not a git checkout")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU is available; layers are measured on a GPU")
    where, until = rows.machine(options.commit), time.monotonic() + options.seconds
    for name in options.models:
        if time.monotonic() > until:
            print(f"{name}: out of time", flush=True)
            continue
        for row in measure(name, options.repeats):
            print(json.dumps(row), flush=True)
            rows.append(options.csv, [where | row])
        torch.cuda.empty_cache()
        print("\n".join(kinds(name)), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
