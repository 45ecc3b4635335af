"""Log the parameter norm and the number of zeros in the gradients: `--log-params-norm` and `--log-num-zeros-in-grad`.

Both cover the whole model and count each element once, for any grid: one rank counts a replicated tensor, and each rank its part of a
sharded one. The norm is over the values that the optimizer updates: the masters if there are any, otherwise the weights. Zeros are counted
in the averaged gradients as the update reads them, so for an FP8 gradient they include underflow.

Only steps that are logged are measured. The sums stay on the device until the log line is written.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.lm.training.state import Training
from msamp.numerics import mcf
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.shard import Holding
from msamp.optim.updates import MASTER, WEIGHT, remainders

_BLOCK = 2**24  # elements squared in FP64 at a time


class ZerosInGradients:
    """Count the zeros in the averaged gradients before the update of a step whose iteration is `due`."""

    def __init__(self, training: Training, due: Callable[[int], bool]) -> None:
        self.training, self._due = training, due
        self._counted: tuple[int, Tensor] | None = None

    def due(self) -> bool:
        """Return whether the current step is measured."""
        return self._due(self.training.iteration + 1)

    @torch.no_grad()
    def before_update(self) -> None:
        """Count the zeros in the averaged gradients if this is due."""
        if not self.due():
            return
        optimizer = self.training.optimizer
        total = torch.zeros((), dtype=torch.int64, device=_device(self.training))
        for holding in counted(self.training, optimizer.ready()):
            gradient = holding.grad.payload if isinstance(holding.grad, ScalingTensor) else holding.grad
            for block in [] if gradient is None else gradient.reshape(-1).split(_BLOCK):
                total += (block.float() == 0).sum()
        self._counted = self.training.iteration + 1, total

    def values(self) -> dict[str, float]:
        """Return `num_zeros_in_grad` of the last step, if it was measured. Collective."""
        measured, self._counted = self._counted, None
        if measured is None or measured[0] != self.training.iteration:
            return {}
        torch.distributed.all_reduce(measured[1])
        return {"num_zeros_in_grad": int(measured[1])}


class ParametersNorm:
    """Compute the L2 norm of the parameters after the last step."""

    def __init__(self, training: Training) -> None:
        self.training = training

    @torch.no_grad()
    def values(self) -> dict[str, float]:
        """Return `params_norm`. Collective."""
        optimizer = self.training.optimizer
        optimizer.wait()
        holdings = counted(self.training, optimizer.holdings())
        blocks = (block for holding in holdings for block in self._values(holding).reshape(-1).split(_BLOCK))
        total = torch.zeros((), dtype=torch.float64, device=_device(self.training))
        for block in blocks:
            total += block.double().square().sum()
        torch.distributed.all_reduce(total)
        return {"params_norm": float(total.sqrt())}

    def _values(self, holding: Holding) -> Tensor:
        """Return the FP32 values of a holding that the optimizer updates."""
        state = self.training.optimizer.state.get(holding.weight, {})
        for key, first in remainders().items():
            if first == WEIGHT and key in state:
                x, y = mcf.load_pair(holding.weight, state[key])
                return x.float() + y.float()
        return fp32_values(state.get(MASTER.key, holding.weight))


def counted(training: Training, holdings: Sequence[Holding]) -> list[Holding]:
    """Return the `holdings` that this rank counts, so that a sum over all ranks has each element of the model once."""
    every_copy = bool(training.grad_sync.shard)
    return [holding for holding in holdings if training.grid.counts(holding.param, every_copy=every_copy)]


def _device(training: Training) -> torch.device:
    return next(training.model.parameters()).device
