"""`--fp8-guard`: the guard of a run's FP8 linear layers, over all ranks and pipeline stages."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from megatron.lm.config import PrecisionConfig
from megatron.lm.model.initial import named_globally
from megatron.lm.processes.process_groups import device
from megatron.lm.training.gradients import chunks
from megatron.lm.training.state import Training
from msamp.nn.precision_guard import Bounds, Change, LayerGuard, linear_layers


def build_guard(model: nn.Module, precision: PrecisionConfig) -> LayerGuard | None:
    """Return the guard of the model's FP8 linear layers, with their names in the whole model; None without `--fp8-guard`. Collective.

    Every rank knows the verdicts about all layers, also of other pipeline stages: all drop their graphs together, and rank 0 can report
    and save them.

    Raises:
        ValueError: on every rank, if no linear layer of the whole model is in FP8.
    """
    if not precision.fp8_guard:
        return None
    layers = dict(linear_layers(pair for chunk in chunks(model) for pair in named_globally(chunk)))
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(layers))
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    if not names:
        raise ValueError("--fp8-guard raises FP8 linear layers, and on this GPU all are faster in BF16 (--fp8-min-gain): drop it")
    return LayerGuard(
        layers,
        bounds=Bounds(
            saturation=precision.fp8_guard_saturation,
            underflow=precision.fp8_guard_underflow,
            sqnr_db=precision.fp8_guard_sqnr,
            shrinkage=precision.fp8_guard_shrinkage,
        ),
        every=precision.fp8_guard_interval,
        raise_after=precision.fp8_guard_raise_after,
        return_after=precision.fp8_guard_return_after,
        group=dist.group.WORLD,
        names=names,
        device=device(),
    )


@contextlib.contextmanager
def guarded(training: Training, iteration: int) -> Iterator[None]:
    """Let the guard, if there is one, measure the training step inside the block if it is due; `check_guard` judges it."""
    guard = training.guard
    if guard is not None and guard.due(iteration):
        guard.arm()
    try:
        yield
    except BaseException:
        if guard is not None:
            guard.disarm()
        raise


def check_guard(training: Training, iteration: int) -> list[Change]:
    """Return the layers that change after a step; none if it was not measured. CUDA graphs must be dropped after a change. After a measured
    step it is collective, and waits for the device."""
    if training.guard is None or not training.guard.armed:
        return []
    training.optimizer.wait()  # for ZeRO's weight gathers
    return training.guard.check(iteration)
