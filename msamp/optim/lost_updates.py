"""Measure the fraction of the next update that rounding of the master weights loses, for each parameter.

A master in FP16, BF16 or FP8 cannot represent an update far below its last digit: rounding to nearest returns the old weight. The loss
then decreases more slowly or not at all, and nothing else shows why. This module runs the next update on copies of a few rows of each
parameter, as it will be stored and in FP32. The lost fraction is the part of the wanted distance that the stored weights do not move,

    1 - sum sign(wanted) effective / sum abs(wanted),

as `msamp.numerics.descent_quality.undelivered_frac` defines it.
"""

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.descent_quality import undelivered_share
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.states import parameter_names
from msamp.optim.update_error import rehearse_batches

SAMPLE = 2**15  # elements per matrix: with stochastic rounding, updates of 1/1000 of a code then have a noise of 0.17 in their fraction
SUMS = 2  # per parameter: the wanted distance, and the part of it that is stored


@torch.no_grad()
def update_distances(optimizer: LowPrecisionOptimizer, sample: int | None = SAMPLE) -> torch.Tensor:
    """Run the next update on copies of some rows, and sum the wanted and the stored changes. It changes nothing and does not wait for the
    device. It runs the collectives with which the ranks decide about a step.

    Args:
        optimizer: with the gradients of its next step in place.
        sample: as for `update_error.rehearse_batches`.

    Returns:
        FP64 [parameters, 2], group by group, on the parameters' device: sums over this process's rows of abs(wanted) and of sign(wanted)
        times the stored change; 0 without an update (no gradient, no state yet, a step that will be skipped, lr 0).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sums = torch.zeros(len(params), SUMS, dtype=torch.float64, device=params[0].device)
    tables = Tables(sums.device)
    for number, both in enumerate(rehearse_batches(optimizer, sample)):
        columns = (both.before, both.exact.masters, both.masters())
        if len({x.shape for x in both.before}) == 1:  # a sample
            distances = _distances(*(torch.stack(xs) for xs in columns))
        else:
            distances = torch.cat([_distances(*(x[None] for x in one)) for one in zip(*columns, strict=True)])
        sums.index_add_(0, tables.send(number, [holding.index for holding in both.holdings]), distances)
    return sums


def _distances(before: torch.Tensor, exact: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return two sums per tensor, FP64 [n, 2], of FP32 [n, ..]: of abs(wanted change), and of the stored change along its sign."""
    wanted, effective = (exact - before).flatten(1), (stored - before).flatten(1)
    return torch.stack([x.sum(1, dtype=torch.float64) for x in (wanted.abs(), wanted.sign() * effective)], 1)


def lost_updates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the fraction of each parameter's next update that rounding will lose, 0 to 1, by the parameter's name.

    Call it between `backward` and `step`, every few hundred steps. It runs the update on copies of at most some ten thousand elements of
    each matrix, waits for the device once, and changes nothing. If a fraction stays above 0.5, the parameter moves less than half as far as
    the learning rate demands. Then use `msamp.initialize(..., master_rounding="stochastic")`, FP32 masters, or a higher learning rate.

    The fraction is 1 - sum sign(wanted) effective / sum abs(wanted). `wanted` is the update of the current states in FP32 arithmetic, and
    `effective` is the change of the stored master. With stochastic rounding it is 0 up to noise. Rounding of the moments does not count.

    Args:
        optimizer: the result of `msamp.initialize`, or a LowPrecisionOptimizer. On several processes the call is collective and averages
            the gradients as `step` would, so no backward may follow before `step`.

    Returns:
        Name -> fraction, the same on all processes that share the optimizer. It is 0 for a parameter without an update: if it is frozen or
        has no gradient, before its first step, at learning rate 0, or if the step will be skipped.

    Raises:
        ValueError: if the optimizer is not one of these.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}; pass the optimizer from msamp.initialize, or a LowPrecisionOptimizer"
        )
    sums = optimizer.shard.total(update_distances(optimizer)).tolist()
    return {name: undelivered_share(*row) for name, row in zip(parameter_names(optimizer), sums, strict=True)}
