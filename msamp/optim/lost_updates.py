"""Which share of the next update is lost where the master weights are stored, parameter by parameter.

A master in FP16, BF16 or FP8 cannot hold an update far below its own last digit: rounding to nearest gives back the old weight. The loss
then falls more slowly, or not at all, and nothing else shows it. Here the next update runs on copies of a few rows of each parameter, as it
will be stored and in FP32. The lost share is that part of the wanted distance which does not arrive,

    1 - sum sign(wanted) effective / sum abs(wanted),

as `msamp.numerics.metrics.undelivered_frac` defines it.
"""

import torch

from msamp.kernels.tables import Tables
from msamp.numerics.metrics import undelivered_share
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.states import parameter_names
from msamp.optim.update_error import rehearse_batches

SAMPLE = 2**15  # elements of a matrix: stochastic rounding of updates of 1/1000 of a code leaves a noise of 0.17 in their share
SUMS = 2  # of a parameter: distance wanted, and what arrives of it


@torch.no_grad()
def update_distances(optimizer: FP8AdamW, sample: int | None = SAMPLE) -> torch.Tensor:
    """Run the next update on copies of some rows, and add up what it wants and what arrives. Changes nothing, and does not wait for the
    device. Takes the collectives with which a step decides whether it is taken.

    Args:
        optimizer: with the gradients of its next step in place.
        sample: as for `update_error.rehearse_batches`.

    Returns:
        FP64 [parameters, 2], group by group, on the device of the parameters: sums over the rows of this process of abs(wanted) and of
        sign(wanted) times the stored change; 0 without an update (no gradient, no state so far, a step that will be skipped, lr 0).
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sums = torch.zeros(len(params), SUMS, dtype=torch.float64, device=params[0].device)
    tables = Tables(sums.device)
    for number, both in enumerate(rehearse_batches(optimizer, sample)):
        columns = (both.before, both.exact.masters, both.masters())
        if len({x.shape for x in both.before}) == 1:  # a sample
            found = _distances(*(torch.stack(xs) for xs in columns))
        else:
            found = torch.cat([_distances(*(x[None] for x in one)) for one in zip(*columns, strict=True)])
        sums.index_add_(0, tables.send(number, [holding.index for holding in both.holdings]), found)
    return sums


def _distances(before: torch.Tensor, exact: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """FP64 [n, 2] of FP32 [n, ..]."""
    wanted, effective = (exact - before).flatten(1), (stored - before).flatten(1)
    return torch.stack([x.sum(1, dtype=torch.float64) for x in (wanted.abs(), wanted.sign() * effective)], 1)


def lost_updates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the share of each parameter's next update that rounding will lose, in [0, 1], by the parameter's name.

    Call it between `backward` and `step`. It runs the update on copies of at most some ten thousand elements of each matrix, waits for the
    device once, and changes nothing: call it every few hundred steps. Where a share stays above a half, the parameter moves less than half
    as far as the learning rate demands: give `msamp.initialize(..., master_rounding="stochastic")`, keep masters in FP32, or raise the
    learning rate.

    The share is 1 - sum sign(wanted) effective / sum abs(wanted): `wanted` is the update that FP32 arithmetic makes of the present states,
    `effective` the change of the stored master. Under stochastic rounding it is 0 up to noise. Rounding of the moments is no part of it.

    Args:
        optimizer: what `msamp.initialize` returns, or an FP8AdamW. On several processes the call is collective and averages the gradients
            as `step` would, so no backward may follow before `step`.

    Returns:
        Name -> share, the same on all processes that share the optimizer. 0 for a parameter without an update: one that is frozen or has no
        gradient, before its first step, at learning rate 0, and for all where the step will be skipped.

    Raises:
        ValueError: for another optimizer.
    """
    if not isinstance(optimizer, FP8AdamW):
        raise ValueError(f"the optimizer is {type(optimizer).__name__}; lost_updates takes what msamp.initialize returns, or an FP8AdamW")
    sums = optimizer.shard.total(update_distances(optimizer)).tolist()
    return {name: undelivered_share(*row) for name, row in zip(parameter_names(optimizer), sums, strict=True)}
