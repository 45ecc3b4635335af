"""Compare a checkpoint's schedule with the schedule of the run that resumes it, as Megatron-LM does.

A resume continues the learning rate and the weight decay of the saved run. If its flags define another schedule (a longer `--train-iters`
without `--lr-decay-iters` is the usual case), it is refused unless `--override-opt-param-scheduler` uses the new one from here on, or
`--use-checkpoint-opt-param-scheduler` keeps the saved one.
"""

import math
from dataclasses import replace
from typing import Any

from megatron.lm.config.rules.check import single_values
from megatron.lm.config.rules.training import schedule
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.sections.training import OptimizerConfig, TrainingConfig
from megatron.lm.config.whole import Config

# Settings of a schedule other than its length: they mean the same in every run.
_SHAPE = ("lr", "min_lr", "lr_decay_style", "lr_wsd_decay_style", "weight_decay", "decoupled_lr", "decoupled_min_lr")
_LENGTHS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_warmup_init")


def differing_schedule(config: Config, saved: Config) -> list[str]:
    """Return how the schedule differs from the checkpoint's, as "--flag value (saved: value)" with the fix; empty with
    `--override-opt-param-scheduler`.
    """
    if config.checkpoint.override_opt_param_scheduler:
        return []
    now, then = _description(config), _description(saved)
    differing = [f"{name} {now.get(name)} (saved: {then.get(name)})" for name in now | then if not _same(now.get(name), then.get(name))]
    if differing:
        differing[-1] += (
            " (or give --override-opt-param-scheduler to use these, --use-checkpoint-opt-param-scheduler to use the saved ones)"
        )
    return differing


def take_schedule(config: Config, saved: tuple[OptimizerConfig, TrainingConfig] | None) -> Config:
    """Return the settings of a resume: with `--use-checkpoint-opt-param-scheduler`, the checkpoint's schedule replaces the flags'.

    Args:
        config: of the run that resumes.
        saved: these sections of the run that wrote the checkpoint; None if none is resumed.

    Raises:
        ValueError: one run counts its length in samples, the other in iterations; or the saved schedule has a value out of range.
    """
    if saved is None or not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config
    optimizer, training = saved
    steps = optimizer.schedule_steps(training)
    unit = "samples" if steps.in_samples else "iters"
    if steps.in_samples != (config.training.train_samples is not None):
        raise ValueError(
            f"--use-checkpoint-opt-param-scheduler: the checkpoint's schedule counts --train-{unit}, and this run's does not: give "
            f"--train-{unit}, or --override-opt-param-scheduler"
        )
    taken: dict[str, Any] = {name: getattr(optimizer, name) for name in (*_SHAPE, *_LENGTHS)}
    taken[f"lr_decay_{unit}"] = steps.decay
    resumed = replace(config, optimizer=replace(config.optimizer, **taken))
    problems = list(single_values(resumed.optimizer)) or list(schedule(resumed, 1))
    if problems:
        raise ValueError(
            f"--use-checkpoint-opt-param-scheduler: the checkpoint's schedule is invalid for this run: {'; '.join(problems)}. Give "
            "--override-opt-param-scheduler and a new schedule"
        )
    return resumed


def _same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal; fractions of a number of samples are compared up to rounding."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-12) if numbers else one == other


def _description(config: Config) -> dict[str, Any]:
    steps = config.schedule_steps
    unit = "samples" if steps.in_samples else "iters"
    shape: dict[str, Any] = {flag(name): getattr(config.optimizer, name) for name in _SHAPE}
    if config.optimizer.lr_decay_style != "WSD":
        shape.pop("--lr-wsd-decay-style")
    if config.optimizer.lr_decay_style == "constant":
        return shape | {f"--lr-warmup-{unit}": steps.warmup}
    return shape | {f"--lr-warmup-{unit}": steps.warmup, f"--lr-decay-{unit}": steps.decay, f"--lr-wsd-decay-{unit}": steps.wsd}
