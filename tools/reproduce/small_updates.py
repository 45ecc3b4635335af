"""Measure the share of small updates that reaches a weight: each level and rounding against FP32's displacement under a constant gradient.

    python tools/reproduce/small_updates.py --csv tools/reproduce/results/rounding/small_updates.csv

A linear layer of 256 x 256 takes 36 steps of AdamW (betas 0.9 and 0.95, no decay) on the same batch with a loss that is linear in the
output, so that the gradient is the same at every step. The share is

    sum(sign(d) e) / sum(abs(d)),

where d is the displacement of an FP32 weight and e that of the level's weight as used in the GEMM: at O3 the E4M3 weight, which has
fewer codes than its FP16 master. Cases are the ends of pre-training (lr 3e-6 in FP8-LM's 175B), DPO and fine-tuning. A CPU takes
seconds.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

import msamp
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, output_file
from msamp.numerics.recipe import by_name
from tools.bench import rows

CASES = ((0.02, 1e-4), (0.02, 3e-5), (0.02, 3e-6), (0.05, 5e-6), (0.05, 1e-6))  # (standard deviation of the weights, learning rate)
RECIPES, ROUNDINGS = ("O1", "O2", "O3"), ("nearest", "stochastic")
WIDTH, TOKENS, STEPS = 256, 64, 36


def displacement(std: float, lr: float, recipe: str = "", rounding: str = "") -> torch.Tensor:
    """Return the displacement of the weight after the steps, FP32 [256, 256]; without a recipe, of plain FP32."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        linear.weight.normal_(0, std)
    before = linear.weight.detach().clone()
    model: Any = torch.nn.Sequential(linear)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    if recipe:
        named = by_name(recipe)
        moments = rounding if named.states.rounded()["moment_rounding"] else None  # O1's moments are FP32
        model, optimizer = msamp.initialize(model, optimizer, recipe=named.with_rounding(master=rounding, moments=moments))
    generator = torch.Generator().manual_seed(1)
    x, direction = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x).float() * direction).sum().backward()
        optimizer.step()
    weight = next(model.parameters())
    return (msamp.fp32_values(weight).float() if recipe else weight.detach()) - before


def share(moved: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the share of the reference displacement that arrived: 1 for all of it, 0 for none, negative if against its direction."""
    return float((moved * reference.sign()).sum() / reference.abs().sum())


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append rows."""
    parser = Parser(description=__doc__)
    parser.add_argument("--csv", type=output_file, required=True, help="file to append the rows to")
    parser.add_argument("--commit", help="commit hash to record if this tree is not a git checkout")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = []
    command = shlex.join(["python", "tools/reproduce/small_updates.py", "--csv", options.csv.name])
    for std, lr in CASES:
        reference = displacement(std, lr)
        for recipe in RECIPES:
            for rounding in ROUNDINGS:
                arrived = share(displacement(std, lr, recipe, rounding), reference)
                print(f"std {std:g}, lr {lr:g}, {recipe} {rounding}: {arrived:.3f}", flush=True)
                row = {"std": std, "lr": f"{lr:g}", "recipe": recipe, "rounding": rounding, "share": f"{arrived:.4f}"}
                lines.append(rows.machine(options.commit) | {"gpu": "cpu", "driver": ""} | row | {"command": command})
    rows.append(options.csv, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
