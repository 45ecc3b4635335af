"""Gradient accumulation over the micro-batches of a step, in the format of `--grad-accum-dtype`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers
from msamp.numerics.formats import Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import quantize, quantize_stochastic
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import ScalingTensor, fp32_values

ACCUMULATORS = ("fp8", "fp8-sr", "bf16", "fp32")
OWNER = "owner"  # no accumulation on this rank: each micro-batch is sent, and the owners accumulate (`msamp.comm.owner_sums`)


class Accumulator(Protocol):
    """One way to accumulate gradients."""

    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        """Return the sum so far plus `g`. Non-finite values stay visible in it, whatever is added later.

        Args:
            total: what `add` returned for the previous micro-batch, which this call may overwrite; None for the first.
            g: FP32 or BF16; the caller gives it up (p.grad, which is dropped). A first `g` of the right dtype becomes the total without a
                copy, and a later `add` writes to it. Otherwise `g` is only read.

        Returns:
            A plain tensor, or a ScalingTensor with a NaN `scale_inv` if a value was not finite; in the shape of `g`.
        """


@dataclass(frozen=True)
class Plain:
    """Accumulate in place in a plain tensor of `dtype`: each sum is computed in FP32 and rounded to nearest even."""

    dtype: torch.dtype

    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        return g.detach().to(self.dtype) if total is None else total.add_(g.detach())


@dataclass(frozen=True)
class Scaled:
    """Accumulate in a ScalingTensor of `fmt`: each sum is computed in FP32 and rounded by `rounding` with a new just-in-time scale."""

    fmt: Format
    rounding: Callable[[torch.Tensor, torch.Tensor, Format], torch.Tensor]

    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        values = fp32_values(g) if total is None else fp32_values(total) + fp32_values(g)
        amax = TENSORWISE.amax(values)
        scale = scale_from_amax(amax, self.fmt.max)
        scale_inv = inverse(scale).masked_fill(~amax.isfinite(), float("nan"))
        return ScalingTensor(self.rounding(values, scale, self.fmt), scale_inv, g.dtype)


def accumulator(name: str, fmt: Format, generator: torch.Generator | None = None) -> Accumulator:
    """Return the accumulator of that name, for a parameter whose gradient is sent in `fmt`.

    Args:
        name: one of `ACCUMULATORS`. "fp8" rounds every sum to nearest even in `fmt`, as in the paper, and over many micro-batches loses
            gradients that are small compared with the sum. "fp8-sr" rounds stochastically, which is unbiased. For a gradient without a
            scale (FP32, BF16), these two and "bf16" use its own dtype; "fp32" is FP32 for every gradient.
        fmt: the parameter's gradient format.
        generator: the random numbers of "fp8-sr", on the gradients' device; seed it for reproducible runs.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in ACCUMULATORS:
        raise ValueError(f"gradient accumulation {name!r} is unknown; choose one of {', '.join(ACCUMULATORS)}")
    if name == "fp32":
        return Plain(torch.float32)
    if not fmt.scaled:
        return Plain(fmt.dtype)
    if name == "bf16":
        return Plain(torch.bfloat16)
    return Scaled(fmt, quantize if name == "fp8" else partial(quantize_stochastic, generator=generator))


def squares_are_finite(gradients: Iterable[torch.Tensor], device: torch.device, peers: Peers | None = None) -> torch.Tensor:
    """Return whether gradients in any format, and the FP32 sum of their squares, are finite: bool 0-dim on `device`, without a host sync.
    With `peers` it is collective and covers all ranks."""
    finite = sum((fp32_values(g).square().sum() for g in gradients), torch.zeros((), device=device, dtype=torch.float32)).isfinite()
    if peers is None:
        return finite
    return peers.all_reduce(finite.float(), dist.ReduceOp.MIN, "whether dropped gradients were finite", None) > 0
