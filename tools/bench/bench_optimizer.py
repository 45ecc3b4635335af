"""Measure the optimizer's step and the quantization of gradients on one GPU, relative to the bytes that they must move.

    python tools/bench/bench_optimizer.py                             GPT-1.3B's parameters at O1, O2 and O3
    python tools/bench/bench_optimizer.py --preset 7b --levels bf16 collage-plus O3
    python tools/bench/bench_optimizer.py --levels O3 'O3 --optimizer-state coat'     a level with its own flags
    python tools/bench/bench_optimizer.py --levels bf16 O3 --flags '--optimizer-state coat'
    python tools/bench/bench_optimizer.py --levels bf16-d --by-torch  also torch's AdamW on FP32 masters of BF16 weights, which is option D

A step reads gradient, moments, master and the additional states of a BF16 update, and writes all but the gradient. It also writes a weight
that has a master, and reads the gradient once more for its norm, unless quantization has computed it (E4M3). Quantization reads a gradient
once and writes it; with `scales anew`, where every gradient is twice or half the previous one, it reads a scaled gradient twice. `share` is
relative to the copy bandwidth of the GPU in the same run. Measurements are appended to --csv.
"""

import argparse
import itertools
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.lm.config import Config, ModelConfig
from megatron.lm.config.presets import PRESETS
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.training.optimizer import build_loss_scaler
from msamp.numerics.formats import BF16, E4M3, FP32, Format
from msamp.numerics.recipe import KINDS, Recipe, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.states import weight_format
from msamp.optim.updates import format_names
from msamp.parallel.data_parallel import grad_sync
from tools.bench import rows, training_steps
from tools.bench.bench_kernels import captured
from tools.precisions import legal_case

BY_TORCH = "step by torch, "  # before the name of an implementation
TORCH: dict[str, dict[str, bool]] = {
    "one tensor at a time": {"foreach": False},
    "lists of tensors": {"foreach": True},
    "fused": {"fused": True},
}


class Weights(nn.Module):
    """The parameters of a GPT by kind, as the trainer stores and groups them."""

    def __init__(self, model: ModelConfig, recipe: Recipe, vocab_size: int, device: str = "cuda") -> None:
        super().__init__()
        hidden, layers = model.hidden_size, model.num_layers
        linear: list[tuple[int, ...]] = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)] * layers
        vectors: list[tuple[int, ...]] = [*[(hidden,)] * (6 * layers + 2), *[(3 * hidden,), (4 * hidden,)] * layers]
        matrices: list[tuple[int, ...]] = [(vocab_size, hidden), (model.seq_length, hidden)]
        kinds = {"linear": (linear, recipe.weight), "matrix": (matrices, recipe.compute), "vector": (vectors, recipe.compute)}
        self.kinds = nn.ModuleDict(
            {kind: nn.ParameterList([weight(s, fmt, device) for s in shapes]) for kind, (shapes, fmt) in kinds.items()}
        )
        self.states: dict[str, StateFormats] = {kind: recipe.formats_of(kind) for kind in KINDS}

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer."""
        return [{"params": list(params.parameters()), "formats": self.states[kind]} for kind, params in self.kinds.items()]

    def bytes(self) -> tuple[int, int, int]:
        """Return the bytes that a step, a quantization of gradients in the parameters' dtype, and one with new scales must move."""
        step = quantization = anew = 0
        for group in self.groups():
            states: StateFormats = group["formats"]
            names, update = format_names(states), updates.by_name(states.update)
            for p in group["params"]:
                beside = [(state, state.format_beside(weight_format(p), names)) for state in update.states]
                own_master = all(fmt is None for state, fmt in beside if state.copy)  # else it is written and not read
                reads = 1 if states.grad == E4M3 else 2
                step += p.numel() * (reads * states.grad.bytes + (2 if own_master else 1) * weight_format(p).bytes)
                step += 2 * sum(fmt.bytes_of(p.shape) for _, fmt in beside if fmt is not None)
                size = p.numel() * (p.dtype.itemsize + states.grad.bytes)
                quantization += size
                anew += 2 * size if states.grad.scaled else size
        return step, quantization, anew


def weight(shape: tuple[int, ...], fmt: Format, device: str) -> nn.Parameter:
    """Return a parameter of small random numbers in a format."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
    return nn.Parameter(ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype))


def times(prepare: Callable[[], Any], run: Callable[[], Any], repeats: int, warm_up: int = 5) -> list[float]:
    """Return the milliseconds of `run` on the device, from its first launch to its last; `prepare` runs before it and is not counted."""
    seconds = []
    for i in range(warm_up + repeats):
        prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            seconds.append(start.elapsed_time(end))
    return seconds


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes/s that a copy of 4 GiB reads and writes."""
    source, target = (torch.empty(2**32, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / (statistics.median(times(lambda: None, lambda: target.copy_(source), repeats)) / 1e3)


def configuration(level: str, options: argparse.Namespace) -> Config:
    """Return the trainer's configuration of a precision with its own flags (`tools.precisions`) and the flags of all levels.

    Raises:
        ValueError: if the trainer refuses them.
    """
    config = training_steps.configuration(level, options)
    check(replace(config, logging=replace(config.logging, dry_run=True)), 1)  # a dry run requires no data
    return config


def measure(config: Config, options: argparse.Namespace, bandwidth: float, device: str = "cuda", flags: str = "") -> list[dict[str, Any]]:
    """Measure four rows: the step as called, the step in a graph, and the quantization of gradients in the worst and the usual case."""
    recipe, optim = build_recipe(config.precision), config.optimizer
    model = Weights(config.model, recipe, options.vocab_size, device)
    formats = {p: group["formats"].grad for group in model.groups() for p in group["params"]}
    sync = grad_sync(model, formats)
    betas, scaler = (optim.adam_beta1, optim.adam_beta2), build_loss_scaler(config.precision, recipe)
    optimizer = LowPrecisionOptimizer(
        model.groups(), optim.lr, betas, optim.adam_eps, optim.weight_decay, clip_grad=optim.clip_grad or None, loss_scale=scaler
    )
    gradients = [torch.randn(p.shape, device=device, dtype=p.dtype) * 1e-4 for p in sync.names]

    def quantize() -> None:
        for p, g in zip(sync.names, gradients, strict=True):
            p.grad = g
            sync.take(p)
        sync.finish()

    factors = itertools.cycle((2.0, 0.5))

    def other_scales() -> None:
        sync.clear()
        torch._foreach_mul_(gradients, next(factors))

    step_bytes, quantisation_bytes, anew_bytes = model.bytes()
    cases = {
        "quantisation, scales anew": (times(other_scales, quantize, options.repeats), anew_bytes),
        "quantisation": (times(sync.clear, quantize, options.repeats), quantisation_bytes),
    }
    # From here on the averaged gradients keep their addresses, as a graph requires.
    cases["step"] = (times(lambda: None, optimizer.step, options.repeats), step_bytes)
    cases["step in a graph"] = (times(lambda: None, captured(optimizer.step), options.repeats), step_bytes)
    parameters = sum(p.numel() for p in sync.names)
    level = " ".join([config.precision.name, *shlex.split(flags), *shlex.split(options.flags)])
    return [_row(level, what, seconds, size, parameters, bandwidth, options) for what, (seconds, size) in cases.items()]


def by_torch(config: Config, options: argparse.Namespace, bandwidth: float, device: str = "cuda") -> list[dict[str, Any]]:
    """Measure the update of BF16 weights with FP32 masters and states by torch: one tensor at a time, by lists of tensors, and fused.

    Each step copies the gradients to FP32, clips them, updates the masters and copies these to the weights. Bytes are those that the update
    must move, as in `measure`, so that `share` says how many more it does.
    """
    recipe, optim = build_recipe(config.precision), config.optimizer
    size, *_ = (model := Weights(config.model, recipe, options.vocab_size, device)).bytes()
    weights: list[torch.Tensor] = list(model.parameters())
    masters: list[torch.Tensor] = [nn.Parameter(p.detach().float()) for p in weights]
    gradients = [torch.randn_like(p) * 1e-4 for p in weights]
    wide = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, wide, strict=True):
        master.grad = gradient
    level, measured = " ".join([config.precision.name, *shlex.split(options.flags)]), []
    for name, chosen in TORCH.items():
        foreach = chosen != TORCH["one tensor at a time"]
        update = torch.optim.AdamW(masters, optim.lr, (optim.adam_beta1, optim.adam_beta2), optim.adam_eps, optim.weight_decay, **chosen)

        def step(update: torch.optim.Optimizer = update, foreach: bool = foreach) -> None:
            _copy(wide, gradients, foreach)
            nn.utils.clip_grad_norm_(masters, optim.clip_grad, foreach=foreach)
            update.step()
            _copy(weights, masters, foreach)

        with torch.no_grad():
            seconds = times(lambda: None, step, options.repeats)
        parameters = sum(p.numel() for p in weights)
        measured.append(_row(level, f"{BY_TORCH}{name}", seconds, size, parameters, bandwidth, options))
    return measured


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], foreach: bool) -> None:
    if foreach:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _row(
    level: str, what: str, seconds: Sequence[float], size: int, parameters: int, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        **rows.machine(options.commit),
        "case": what,
        "level": level,
        "preset": options.preset,
        "params_m": round(parameters / 1e6, 1),
        **rows.percentile_columns("ms", seconds, digits=3),
        "bytes_per_param": round(size / parameters, 3),
        "gb_s": round(size / middle / 1e6),
        "copy_gb_s": round(bandwidth / 1e9),
        "share": round(size / (middle / 1e3) / bandwidth, 3),
    }


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = Parser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="1.3b")
    parser.add_argument("--levels", nargs="+", type=legal_case, default=["O1", "O2", "O3"], help="levels and precisions, with flags")
    parser.add_argument("--vocab-size", type=count(1), default=50304)
    parser.add_argument("--by-torch", action="store_true", help="also torch's AdamW, for levels of BF16 weights with FP32 states")
    parser.add_argument("--repeats", type=count(2), default=30)
    parser.add_argument("--flags", default="", help="more flags of msamp pretrain, such as --optimizer-state coat")
    rows.add_flags(parser, "optimizer.csv")
    parser.set_defaults(micro_batch_size=1)
    options = parser.parse_args(arguments)
    configurations = [configuration(level, options) for level in options.levels]
    for level, config in zip(options.levels if options.by_torch else (), configurations, strict=False):
        states = (recipe := build_recipe(config.precision)).formats_of("linear")
        if not (recipe.weight == states.grad == BF16 and states.master == states.m == states.v == FP32):
            raise ValueError(f"--by-torch: {level} is not BF16 weights with FP32 masters and moments: give --levels bf16-d")
    if not torch.cuda.is_available():
        parser.error("no GPU is available; the optimizer is measured on a GPU")
    bandwidth = copy_bandwidth(options.repeats)
    torch.cuda.empty_cache()
    for level, config in zip(options.levels, configurations, strict=True):
        measured = measure(config, options, bandwidth, flags=level.partition(" ")[2])
        torch.cuda.empty_cache()
        measured += by_torch(config, options, bandwidth) if options.by_torch else []
        torch.cuda.empty_cache()
        print(*measured, sep="\n", flush=True)
        rows.append(options.csv, measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
