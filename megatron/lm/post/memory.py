"""Bytes of a model and its optimizer between steps, by kind (FP8-LM, Table 4: weights, and states)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from msamp.numerics.tensor import ScalingTensor
from msamp.optim.shard import gradient
from msamp.optim.updates import MASTER


@dataclass(frozen=True)
class Stored:
    """Bytes by kind.

    Attributes:
        weights: parameters, which may be their own master weights (O1, O2).
        gradients: currently in `p.grad`, or in `p.main_grad` of a synchronizer.
        masters, moments: of the optimizer.
        parameters: number of parameters.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    parameters: int = 0

    @property
    def states(self) -> int:
        """Return the bytes of the optimizer."""
        return self.masters + self.moments

    def __add__(self, other: "Stored") -> "Stored":
        ours, theirs = asdict(self), asdict(other)
        return Stored(**{kind: ours[kind] + theirs[kind] for kind in ours})


def size(x: torch.Tensor | None) -> int:
    """Return the bytes of a plain or low-precision tensor including its scale; 0 for None."""
    if x is None:
        return 0
    if isinstance(x, ScalingTensor):
        return x.payload.nbytes + x.scale_inv.nbytes
    return x.nbytes


def stored(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Stored:
    """Return the bytes of a model and the optimizer of its parameters; a parameter that two modules share counts once."""
    total = Stored()
    for p in model.parameters():
        state = {} if optimizer is None else optimizer.state.get(p, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
        master = size(tensors.pop(MASTER.key, None))
        total += Stored(size(p), size(gradient(p)), master, sum(map(size, tensors.values())), p.numel())
    return total


def peak(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on a GPU since `reset_peak`; None on a CPU, where nothing counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(devices: Iterable[torch.device]) -> None:
    """Reset `peak`."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
