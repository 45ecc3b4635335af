"""Norm of the parameters and zeros among the gradients, for the log: `--log-params-norm` and `--log-num-zeros-in-grad`.

Both are over the whole model, each element once, whatever the grid: of tensors that ranks share one rank counts, of sharded ones each rank
its part. The norm is of the values that the optimizer updates: the masters where there are any, else the weights. Zeros are counted in the
averaged gradients as the update reads them, so an FP8 gradient counts what underflowed.

Only steps that are logged are measured. The sums stay on the device until the log line is written.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.lm.config import Config
from megatron.lm.step import RareStepObserver
from megatron.lm.training.state import Training
from msamp.numerics import mcf
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.shard import Holding
from msamp.optim.updates import MASTER, WEIGHT, remainders

_BLOCK = 2**24  # elements whose squares are in FP64 at a time


class ZerosInGradients:
    """Counts the zeros among the averaged gradients before the update of a logged step.

    Args:
        training: what the steps work on.
        due: iteration -> whether it is logged.
    """

    def __init__(self, training: Training, due: Callable[[int], bool]) -> None:
        self.training, self._due = training, due
        self._counted: tuple[int, Tensor] | None = None

    def due(self) -> bool:
        """Whether the step under way is measured."""
        return self._due(self.training.iteration + 1)

    @torch.no_grad()
    def before_update(self) -> None:
        """With the averaged gradients in place: count their zeros where it is due."""
        if not self.due():
            return
        optimizer = self.training.optimizer
        counts = [_zeros(holding.grad) for holding in counted(self.training, optimizer.ready()) if holding.grad is not None]
        total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=_device(self.training))
        self._counted = self.training.iteration + 1, total

    def values(self) -> dict[str, float]:
        """`num_zeros_in_grad` of the last step, if it was measured; collective."""
        measured, self._counted = self._counted, None
        if measured is None or measured[0] != self.training.iteration:
            return {}
        torch.distributed.all_reduce(measured[1])
        return {"num_zeros_in_grad": int(measured[1])}


class ParametersNorm:
    """The L2 norm of the parameters after the last step.

    Args:
        training: what the steps work on.
    """

    def __init__(self, training: Training) -> None:
        self.training = training

    @torch.no_grad()
    def values(self) -> dict[str, float]:
        """`params_norm`; collective."""
        optimizer = self.training.optimizer
        optimizer.wait()
        squares = [_square_sum(x) for holding in counted(self.training, optimizer.holdings()) for x in [self._values(holding)]]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=_device(self.training))
        torch.distributed.all_reduce(total)
        return {"params_norm": float(total.sqrt())}

    def _values(self, holding: Holding) -> Tensor:
        """What the optimizer updates of a holding, FP32."""
        state = self.training.optimizer.state.get(holding.weight, {})
        for key, first in remainders().items():
            if first == WEIGHT and key in state:
                x, y = mcf.load_pair(holding.weight, state[key])
                return x.float() + y.float()
        return fp32_values(state.get(MASTER.key, holding.weight))


class Observers:
    """Several observers of a step as one."""

    def __init__(self, observers: Sequence[RareStepObserver]) -> None:
        self.observers = observers

    def due(self) -> bool:
        """Whether one of them measures the step under way."""
        return any(observer.due() for observer in self.observers)

    def before_update(self) -> None:
        """Call each in turn."""
        for observer in self.observers:
            observer.before_update()


def chosen(config: Config, training: Training, due: Callable[[int], bool]) -> tuple[ZerosInGradients | None, ParametersNorm | None]:
    """What the flags ask to measure."""
    logging = config.logging
    zeros = ZerosInGradients(training, due) if logging.log_num_zeros_in_grad else None
    return zeros, ParametersNorm(training) if logging.log_params_norm else None


def counted(training: Training, holdings: Sequence[Holding]) -> list[Holding]:
    """Those of `holdings` that this rank counts, so that a sum over all ranks has each element of the model once."""
    every_copy = bool(training.grad_sync.shard)
    return [holding for holding in holdings if training.grid.counts(holding.param, every_copy=every_copy)]


def _zeros(gradient: Tensor) -> Tensor:
    """int64 0-dim."""
    payload = gradient.payload if isinstance(gradient, ScalingTensor) else gradient
    return sum(((block.float() == 0).sum() for block in payload.reshape(-1).split(_BLOCK)), torch.zeros((), device=payload.device).long())


def _square_sum(values: Tensor) -> Tensor:
    """FP64 0-dim."""
    parts = [block.double().square().sum() for block in values.reshape(-1).split(_BLOCK)]
    return torch.stack(parts).sum()


def _device(training: Training) -> torch.device:
    return next(training.model.parameters()).device
