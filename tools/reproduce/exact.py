"""Reproduce what follows from definitions alone: FP8-LM Tables 1, 9 and 10, Collage Tables 1 and 2."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.lm.config.presets import PRESETS
from msamp.numerics import formats, mcf
from msamp.optim.collage import collage_adamw
from tools.reproduce.entry import Finding, Task, paper

COLUMNS9 = (
    "largest",
    "smallest normal",
    "smallest subnormal",
    "error at the smallest normal",
    "error at the largest",
    "error at the smallest subnormal",
    "error at the largest subnormal",
)


def table1(task: Task) -> Iterator[Finding]:
    """Compare the presets with the paper's table."""
    wrong = 0
    for name, theirs_of in paper("fp8lm.table1").items():
        size = PRESETS[name]
        tokens = size["global_batch_size"] * size["seq_length"]
        keys = ("hidden_size", "num_attention_heads", "num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size", "lr")
        ours = (*(size[key] for key in keys), round(tokens / 2**20, 3), round(size["train_iters"] * tokens / 1e9, 1))
        labels = ("width", "heads", "layers", "TP", "PP", "learning rate", "batch, M tokens", "training, B tokens")
        for label, value, theirs in zip(labels, ours, theirs_of, strict=True):
            wrong += value != theirs
            yield Finding(f"{name}: {label}", float(value), float(theirs))
    yield Finding("settings that differ", float(wrong), 0.0)


def positive_codes(fmt: formats.Format) -> list[tuple[bool, float]]:
    """Return the positive finite numbers of a format in order, from their codes: all for 8 and 16 bits, those at the ends of the ranges for
    FP32.

    Returns:
        (normal, value) per number.
    """
    bits = 8 * fmt.dtype.itemsize
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    if bits == 32:
        codes = torch.tensor([*range(1, 4), *range(0x7FFFFD, 0x800003), *range(0x7F7FFFFD, 0x7F800000)], dtype=torch.int64)
    else:
        codes = torch.arange(1, 2 ** (bits - 1))
    values = codes.to(integer).view(fmt.dtype).double()
    normal = codes >= 2**fmt.mantissa_bits  # an exponent that is not zero
    finite = values.isfinite()
    return list(zip(normal[finite].tolist(), values[finite].tolist(), strict=True))


def range_and_error(fmt: formats.Format) -> tuple[float, ...]:
    """Return the columns of Table 9: the ends of the ranges, and the gap to the neighbour there, relative to the larger of the two at the
    smallest number of a range and to the smaller at the largest."""
    codes = positive_codes(fmt)
    normal, subnormal = ([value for is_normal, value in codes if is_normal == kind] for kind in (True, False))

    def at_start(values: list[float]) -> float:
        return (values[1] - values[0]) / values[1]

    def at_end(values: list[float]) -> float:
        return (values[-1] - values[-2]) / values[-2]

    return normal[-1], normal[0], subnormal[0], at_start(normal), at_end(normal), at_start(subnormal), at_end(subnormal)


def table9(task: Task) -> Iterator[Finding]:
    """Compute ranges and errors of the formats from their codes."""
    worst = 0.0
    for fmt in formats.ALL:
        for label, ours, theirs in zip(COLUMNS9, range_and_error(fmt), paper("fp8lm.table9")[fmt.name], strict=True):
            worst = max(worst, abs(ours / theirs - 1))
            yield Finding(f"{fmt.name}: {label}", ours, theirs)
    yield Finding("largest difference from the printed digits", 100 * worst, 0.0, "%")


def table10(task: Task) -> Iterator[Finding]:
    """Compare the mixture with its normalized weights."""
    shares = paper("fp8lm.table10")
    total = sum(shares.values())
    yield Finding("sum of the sampling proportions", total, 100.0, "%")
    for name, share in shares.items():
        yield Finding(name, 100 * share / total, share, "%")


def collage_table1(task: Task) -> Iterator[Finding]:
    """Represent beta2 as a pair of BF16 numbers."""
    pairs = {float(beta2): pair for beta2, pair in paper("collage.table1").items()}
    for beta2, pair in pairs.items():
        for position, ours, theirs in zip(("first", "second"), mcf.expansion(beta2), pair, strict=True):
            yield Finding(f"beta2 {beta2}, {position} component", float(ours), float(theirs))
    far = max(abs(sum(float(x) for x in mcf.expansion(beta2)) / beta2 - 1) for beta2 in pairs)
    yield Finding("largest relative error of a pair", far)


def collage_table2(task: Task) -> Iterator[Finding]:
    """Count the bytes per parameter of weight, gradient and optimizer states after a step."""
    for variant, theirs in paper("collage.table2").items():
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        optimizer = collage_adamw([weight], variant=variant)
        optimizer.step()
        states: list[Tensor] = [x for x in optimizer.state[weight].values() if x.dim()]
        total = sum(x.numel() * x.element_size() for x in (weight, weight.grad, *states))
        yield Finding(f"option {variant}", total / weight.numel(), float(theirs), "bytes per parameter")
