"""Gradient accumulation over the micro-batches of a step, in the format of `--grad-accum-dtype`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor, fp32_values

ACCUMULATORS = ("fp8", "fp8-sr", "bf16", "fp32")
OWNER = "owner"  # no accumulation on this rank: each micro-batch is sent, and the owners accumulate (`msamp.comm.bucket_sender`)


class Draws:
    """The random words of "fp8-sr": a key, and the number of the draw, which each addition advances on the device.

    The number follows from the step and from how many additions came before it in the step, so a resumed run draws the same words, and so
    does a CUDA graph, which repeats the launches of its capture.

    Args:
        key: different on every data-parallel rank, or their errors would add up (`tensor_key`).
        device: of the gradients.

    Attributes:
        number: INT64 0-dim on `device`: `PER_STEP` times the step, plus the additions in it.
    """

    PER_STEP = 2**20  # more additions in one step would continue into the next step's draws

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = key
        self.number = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, step: int) -> None:
        """Continue with the first draw of a step."""
        self.number.fill_(step * self.PER_STEP)

    def end_step(self) -> None:
        """Continue with the first draw of the next step, without a host sync."""
        self.number.bitwise_and_(-self.PER_STEP).add_(self.PER_STEP)


class Accumulator(Protocol):
    """One way to accumulate gradients."""

    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        """Return the sum so far plus `g`. Non-finite values stay visible in it, whatever is added later.

        Args:
            total: what `add` returned for the previous micro-batch, which this call may overwrite; None for the first.
            g: FP32 or BF16; the caller gives it up (p.grad, which is dropped). A first `g` of the right dtype becomes the total without a
                copy, and a later `add` writes to it. Otherwise `g` is only read.

        Returns:
            A plain tensor, or a ScalingTensor with a NaN `scale_inv` if a value was not finite; in the shape of `g`. A sum stays in the
            memory of the first one, where a CUDA graph finds it.
        """

    def last(self, total: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the sum with the step's last gradient, which is sent next: as `add`, but the result may be a plain tensor in the memory
        of `g`, so that a sum is not rounded to FP8 twice."""


@dataclass(frozen=True)
class Plain:
    """Accumulate in place in a plain tensor of `dtype`: each sum is computed in FP32 and rounded to nearest even."""

    dtype: torch.dtype

    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        return g.detach().to(self.dtype) if total is None else total.add_(g.detach())

    def last(self, total: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return self.add(total, g)


@dataclass(frozen=True)
class Scaled:
    """Accumulate in place in a ScalingTensor of `fmt`: each sum is computed in FP32 and rounded with a new just-in-time scale,
    stochastically if there are `draws`. The last sum of a step is rounded to the dtype of its gradient instead, and by whoever sends it."""

    fmt: Format
    draws: Draws | None = None

    @torch.no_grad()
    def add(self, total: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor:
        g, first = g.detach().contiguous(), total is None
        if total is None:
            payload = torch.empty(g.shape, dtype=self.fmt.dtype, device=g.device)
            total = ScalingTensor(payload, torch.empty((), dtype=torch.float32, device=g.device), g.dtype)
        assert isinstance(total, ScalingTensor)
        draw, key = (None, 0) if self.draws is None else (self.draws.number, self.draws.key)
        ops.accumulate(g, total.payload, total.scale_inv, draw, key, first)
        return total

    @torch.no_grad()
    def last(self, total: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        assert isinstance(total, ScalingTensor)
        g = g.detach().contiguous()
        ops.add_payload_(g, total.payload, total.scale_inv)
        return g


def accumulator(name: str, fmt: Format, draws: Draws | None = None) -> Accumulator:
    """Return the accumulator of that name, for a parameter whose gradient is sent in `fmt`.

    Args:
        name: one of `ACCUMULATORS`. "fp8" rounds every sum to nearest even in `fmt`, as in the paper, and over many micro-batches loses
            gradients that are small compared with the sum. "fp8-sr" rounds stochastically, which is unbiased. For a gradient without a
            scale (FP32, BF16), these two and "bf16" use its own dtype; "fp32" is FP32 for every gradient.
        fmt: the parameter's gradient format.
        draws: the random words of "fp8-sr".

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
    return Scaled(fmt, draws if name == "fp8-sr" else None)


def squares_are_finite(gradients: Iterable[torch.Tensor], device: torch.device, peers: Peers | None = None) -> torch.Tensor:
    """Return whether gradients in any format, and the FP32 sum of their squares, are finite: bool 0-dim on `device`, without a host sync.
    With `peers` it is collective and covers all ranks."""
    finite = sum((fp32_values(g).square().sum() for g in gradients), torch.zeros((), device=device, dtype=torch.float32)).isfinite()
    if peers is None:
        return finite
    return peers.all_reduce(finite.float(), dist.ReduceOp.MIN, "whether dropped gradients were finite", None) > 0
