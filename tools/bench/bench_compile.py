"""Measure the speedup of `torch.compile` for a plain PyTorch model of GPT layers, in BF16 and after `msamp.initialize`, on one GPU.

    python tools/bench/bench_compile.py                          12 layers, hidden 2048, 4 sequences of 2,048
    python tools/bench/bench_compile.py --cases bf16 O2 --layers 24 --ways eager reduce-overhead

A case is timed eager and compiled (`compiled`), and with --ways reduce-overhead compiled into CUDA graphs: forward, backward and the
optimizer's step, with a synchronization after each step. Measurements are appended to --csv.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import msamp
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from msamp.numerics import recipe
from tools.bench import rows

CASES = ("bf16", "O1", "O2", "O3")
WAYS = {"eager": "", "compiled": " compiled", "reduce-overhead": " compiled, reduce-overhead"}  # -> suffix of a case's name


class Block(nn.Module):
    """A pre-norm transformer layer without dropout: x [b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def step_of(case: str, way: str, options: argparse.Namespace) -> Callable[[], Tensor]:
    """Return a training step, in one of `WAYS`, on its own model; the step returns the loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: nn.Module = nn.Sequential(*(Block(options.hidden, options.heads) for _ in range(options.layers))).to(device, torch.bfloat16)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if recipe.by_name(case).fp8:
        model, optimizer = msamp.initialize(model, optimizer, case)
    x = torch.randn(options.micro_batch_size, options.seq_length, options.hidden, dtype=torch.bfloat16, device=device)
    if way != "eager":
        torch._dynamo.reset()
        for block in model.children():
            block.compile(backend=options.backend, mode=None if way == "compiled" else way)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def measure(case: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row."""
    step = step_of(case, way, options)
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    losses = [float(step()) for _ in range(options.warm_up)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.steps):
        wait()
        start = time.perf_counter()
        loss = step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    low, middle, high = rows.percentiles(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    shape = {"layers": options.layers, "hidden": options.hidden, "micro_batch": options.micro_batch_size, "seq_length": options.seq_length}
    figures = {"ms_p20": round(low, 1), "ms": round(middle, 1), "ms_p80": round(high, 1), "peak_gib": round(peak, 2)}
    return {"case": case + WAYS[way], **shape, **figures, "first_loss": losses[0], "loss": float(loss)}


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled"], choices=WAYS)
    parser.add_argument("--layers", type=count(1), default=12)
    parser.add_argument("--hidden", type=count(1), default=2048)
    parser.add_argument("--heads", type=count(1), default=16)
    parser.add_argument("--seq-length", type=count(1), default=2048)
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--warm-up", type=count(1), default=20, help="steps that are not measured, at least 1")
    parser.add_argument("--steps", type=count(2), default=10, help="measured steps, at least 2")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    rows.add_flags(parser, "compile.csv")
    options = parser.parse_args(argv)
    if "reduce-overhead" in options.ways and options.backend != "inductor":
        raise ValueError(f"--backend {options.backend} --ways reduce-overhead: only inductor creates CUDA graphs; drop one of the two")
    where = rows.machine(options.commit)
    for case in options.cases:
        for way in options.ways:
            row = measure(case, way, options)
            print(json.dumps(row), flush=True)
            rows.append(options.csv, [where | row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
