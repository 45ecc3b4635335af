"""Train a GPT in which some channels of SwiGLU become outliers, at several precisions: which of them still learn?

    python tools/bench/bench_outliers.py                                     125M, BF16 and O3 with and without each remedy
    python tools/bench/bench_outliers.py --factor 1                          the same without outliers: what the remedies cost
    python tools/bench/bench_outliers.py --cases bf16 'O3 --grad-format bf16' --preset 345m --growth 0

SwiGLU's two weights align late in training (Fishman et al., 2024, section 4): a channel then grows with the square of the token's
projection on their common direction. The benchmark reproduces that in minutes. From step --at on, in every layer, the gate's and the other
row of --channels channels are one direction, and both grow until the channel is --factor times as large, at once (--growth 0) or in equal
ratios over --growth steps. The channel's column of the next weight shrinks by the same factor, so that in exact arithmetic the model
computes the same, whatever the factor is. These rows and columns are held after every step; everything else is trained. From step --until
on they are held as they were before they grew. The learning rate is --rate times the preset's, four by default.

What is wrong with one scale per tensor then shows as a loss: the other channels lose the bits that the outlier's range takes. BF16 has no
scale, and is the reference. The gradient of the next weight has the same outliers in its columns, so FP8 gradients fail for a reason
of their own: `--grad-format bf16` in the default cases leaves the activations' cast as the only difference.

With `--fp8-guard` a row also has the largest number of layers that were in BF16 at once (`raised`), of how many (`layers`), and how many
still are at the end (`still_raised`).

Tokens are a Markov chain, each one of --followers followers of the last, so the loss can fall from ln(vocabulary) to ln(followers). `loss`
is the mean of the last tenth of the steps, `before` of the tenth before --at, `from_first` the difference from the first case in percent.
Measurements are appended to --csv.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from megatron.lm.training.fp8_guard import check_guard, guarded
from msamp.numerics.tensor import ScalingTensor
from tools.bench import rows
from tools.bench.training_steps import configuration
from tools.precisions import legal_case

GUARD = "--fp8-guard --fp8-guard-interval 10"
CASES = (
    *("bf16", "O3", "O3 --grad-format bf16", "O3 --grad-format bf16 --smooth-swiglu", f"O3 --grad-format bf16 {GUARD}"),
    f"O3 --grad-format bf16 --smooth-swiglu {GUARD}",
)
MODEL = "--swiglu --normalization RMSNorm --disable-bias-linear --clip-grad 0"
VOCABULARY = 4096


class Outliers:
    """Aligned and growing channels of SwiGLU, the first ones of every layer.

    Args:
        model: a GPT with SwiGLU on one process.
        channels: per layer.
        factor: of the grown channels, at least 1.
        growth: steps of the growth; 0: at once.
        end: number of steps after which they are as before; None: never.
    """

    def __init__(self, model: nn.Module, channels: int, factor: float, growth: int, end: int | None = None) -> None:
        self.channels, self.factor, self.growth, self.end = channels, factor, growth, end
        mlps = [layer.mlp for layer in model.decoder.layers]  # type: ignore[union-attr]
        weights = [(mlp.linear_fc1.weight, mlp.linear_fc2.weight) for mlp in mlps]
        # Per layer: fc1's weight [2 F, h], the gate's rows first; fc2's [h, F]; FP32 direction [channels, h]; FP32 column [h, channels].
        self.held = [(fc1, fc2, _values(fc1)[:channels].clone(), _values(fc2)[:, :channels].clone()) for fc1, fc2 in weights]

    @torch.no_grad()
    def hold(self, step: int) -> None:
        """Write the rows and columns as they are `step` steps after the outliers' first one. The optimizer's masters follow."""
        grown = self.factor ** min(1.0, (step + 1) / max(1, self.growth)) if self.growth else self.factor
        if self.end is not None and step >= self.end:
            grown = 1.0
        for fc1, fc2, direction, column in self.held:
            first, second = _values(fc1), _values(fc2)
            half = first.shape[0] // 2
            for start in (0, half):
                first[start : start + self.channels] = direction * math.sqrt(grown)
            second[:, : self.channels] = column / grown
            _write(fc1, first)
            _write(fc2, second)


def _values(p: nn.Parameter) -> Tensor:
    """Return a copy of the values in FP32."""
    return p.dequantize(torch.float32) if isinstance(p, ScalingTensor) else p.detach().float().clone()


def _write(p: nn.Parameter, values: Tensor) -> None:
    """Write values to a weight as its optimizer does, which restarts no amax history: past amaxes of a growing channel are the point."""
    if not isinstance(p, ScalingTensor):
        p.copy_(values)
        return
    quantized = ScalingTensor.quantize(values, p.format)
    p.payload.copy_(quantized.payload)
    p.scale_inv.copy_(quantized.scale_inv)


def chain(config: Config, vocab_size: int, followers: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of a Markov chain forever, the same for every case."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, vocab_size, (vocab_size, followers), generator=generator).to(device)
    draw = torch.Generator(device).manual_seed(1)
    size, length = config.training.micro_batch_size, config.model.seq_length + 1
    mask = torch.ones(size, length - 1, device=device)
    positions = torch.arange(length - 1, device=device).expand(size, -1)
    while True:
        choices = torch.randint(0, followers, (size, length), generator=draw, device=device)
        tokens = torch.empty(size, length, dtype=torch.int64, device=device)
        tokens[:, 0] = torch.randint(0, vocab_size, (size,), generator=draw, device=device)
        for n in range(1, length):
            tokens[:, n] = table[tokens[:, n - 1], choices[:, n]]
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask,
            "position_ids": positions,
        }


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one case and return its row; needs `process_groups.initialize`."""
    config = settings(case, options)
    training = build_training(config, options.vocab_size)
    device = process_groups.device()
    batches, graphs = chain(config, options.vocab_size, options.followers, device), step_graph.build(training)
    end = None if options.until is None else options.until - options.at
    outliers, losses, start, guard, raised = None, [], time.perf_counter(), training.guard, 0
    for step in range(options.steps):
        if step == options.at:
            outliers = Outliers(training.model, options.channels, options.factor, options.growth, end)
        if outliers is not None:
            outliers.hold(step - options.at)
        with guarded(training, step + 1):
            result = train_step(training, batches, graphs)
        losses.append(result.loss_sum / result.tokens)
        changes = check_guard(training, step + 1)
        for change in changes:
            print(json.dumps({"case": case, "iteration": change.step, "change": str(change)}), flush=True)
        if guard is not None:
            raised = max(raised, len(guard.raised))
        if changes and graphs is not None:
            graphs.release()
            graphs = step_graph.build(training)
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start
    if graphs is not None:
        graphs.release()
    tenth = max(1, options.steps // 10)
    return {
        "case": case,
        "before": round(statistics.fmean(curve[max(0, options.at - tenth) : options.at]), 4),
        "loss": round(statistics.fmean(curve[-tenth:]), 4),
        "seconds": round(seconds, 1),
        "raised": None if guard is None else raised,
        "layers": None if guard is None else len(guard.names),
        "still_raised": None if guard is None else len(guard.raised),
    }


def settings(case: str, options: argparse.Namespace) -> Config:
    """Return the configuration of a case: the preset with SwiGLU, and its learning rate times `--rate`."""
    flags = f"{MODEL} {options.flags}"
    plain = configuration(case, argparse.Namespace(**vars(options) | {"flags": flags}))
    rate = f"--lr {plain.optimizer.lr * options.rate:g} --train-iters {options.steps} --lr-warmup-iters {max(1, options.steps // 20)}"
    return configuration(case, argparse.Namespace(**vars(options) | {"flags": f"{flags} {rate}"}))


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Train all cases, print and append their rows."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), type=legal_case, help="precisions with flags; the first is the reference"
    )
    parser.add_argument("--preset", default="125m")
    parser.add_argument("--micro-batch-size", type=count(1), default=8)
    parser.add_argument("--vocab-size", type=count(2), default=VOCABULARY)
    parser.add_argument("--followers", type=count(1), default=8, help="of each token")
    parser.add_argument("--steps", type=count(10), default=600)
    parser.add_argument("--at", type=count(1), default=200, help="first step with outliers")
    parser.add_argument("--growth", type=count(0), default=100, help="steps in which they grow")
    parser.add_argument("--until", type=count(1), help="first step after them; default: they stay")
    parser.add_argument("--channels", type=count(1), default=1, help="outliers per layer")
    parser.add_argument("--factor", type=float, default=2.0**16, help="by which they grow")
    parser.add_argument("--rate", type=float, default=4.0, help="multiple of the preset's learning rate")
    parser.add_argument("--flags", default="", help="more flags of msamp pretrain")
    rows.add_flags(parser, "outliers.csv")
    options = parser.parse_args(argv)
    if not 1 <= options.factor < 2.0**40:
        parser.error(f"--factor is {options.factor:g}; it must be from 1 to 2^40: 1 for no outliers")
    if options.at >= options.steps:
        parser.error(f"--at is {options.at}; it must be less than --steps, {options.steps}")
    if options.until is not None and not options.at < options.until < options.steps:
        parser.error(f"--until is {options.until}; it must be between --at, {options.at}, and --steps, {options.steps}")
    process_groups.initialize(settings(options.cases[0], options))
    common = {
        "preset": " ".join(f"{options.preset} {options.flags}".split()),
        "micro_batch": options.micro_batch_size,
        "steps": options.steps,
        "at": options.at,
        "until": options.until,
        "growth": options.growth,
        "channels": options.channels,
        "factor": f"{options.factor:g}",
        "rate": f"{options.rate:g}",
    }
    first = None
    for case in options.cases:
        row = measure(case, options)
        first = row["loss"] if first is None else first
        row["from_first"] = round(100 * (row["loss"] / first - 1), 3)
        print(json.dumps(row), flush=True)
        rows.append(options.csv, [rows.machine(options.commit) | common | row])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
