"""The functions that a training loop calls, with the names of Apex and of the slides.

Apex has one global state per process. Here the state belongs to the optimizers that were initialized together, so `state_dict` takes one of
them as its argument.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from msamp.fp16.opt_level import Keep, OptLevel, by_name, check_model, is_norm, prepare_model
from msamp.fp16.scaler import LossScaler
from msamp.fp16.step import AmpStep

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(eq=False)
class _Amp:
    """State that the optimizers of one `initialize` share: a scaler per loss, and an `AmpStep` per optimizer."""

    scalers: list[LossScaler]
    steps: dict[torch.optim.Optimizer, AmpStep]


def _list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], level: OptLevel) -> None:
    seen: set[torch.Tensor] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
        if hasattr(optimizer, "amp"):
            raise ValueError("the optimizer was already passed to msamp.amp.initialize; call it once, with all models in a list")
        if level.fp16_weights and not level.master_weights and optimizer.state:
            raise ValueError(f"the optimizer already has FP32 states, but weights are FP16 at {level.name}; use a new optimizer, or O2")
        for group in optimizer.param_groups:
            if not seen.isdisjoint(group["params"]):
                raise ValueError("a parameter is in two optimizers and would be unscaled twice; put each parameter in one optimizer")
            seen.update(group["params"])
            eps, rounded = group.get("eps"), level.fp16_weights and not level.master_weights and not group.get("fused")
            if rounded and isinstance(eps, float) and eps and not torch.tensor(eps, dtype=torch.float32, device="cpu").half():
                raise ValueError(f"eps is {eps}, which is 0 in FP16, the optimizer's precision at {level.name}; use eps >= 1e-7, or O2")


def initialize(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizers,
    opt_level: str = "O1",
    *,
    loss_scale: float | str | None = None,
    num_losses: int = 1,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    min_loss_scale: float = 2.0**-24,
    max_loss_scale: float = 2.0**24,
    keep_fp32: Keep = is_norm,
) -> tuple[Any, Any]:
    """Prepare FP32 models and their optimizers for FP16 training (slides "Nvidia AMP"; Micikevicius et al. 2017; Apex's levels).

    | level | weights | arithmetic | optimizer updates | loss scale |
    | --- | --- | --- | --- | --- |
    | O0 | FP32 | FP32 | the weights | 1 |
    | O1 | FP32 | GEMM-like operations in FP16, the rest in FP32 (torch.autocast) | the weights | dynamic |
    | O2 | FP16, norms FP32 | FP16, norms FP32 | FP32 masters, rounded to the weights after each step | dynamic |
    | O3 | FP16 | FP16 | the weights | 1 |

    Models take and return FP32 at every level. Casts apply only inside `forward`, so a loss outside the model is FP32. The optimizer
    remains the same object. At O2 its groups contain the masters (`master_params`), and `step` drops their gradients. Weights that
    something else writes at O2 (a pretrained `load_state_dict`) are copied to the masters at the next step. Wrap the model in
    DistributedDataParallel afterwards: gradients that it averages overflow on all ranks or on none.

    Args:
        model: a module or a list of modules, FP32, changed in place.
        optimizer: one or a list, without common parameters; at O3 before the first step, without states.
        loss_scale: "dynamic" or a constant; None uses the level's default.
        num_losses: number of losses with their own scale, see `scale_loss`.
        init_scale, growth_interval, min_loss_scale, max_loss_scale: of a dynamic scale, see `LossScaler`.
        keep_fp32: module -> bool, whether it stays FP32 at O2.

    Returns:
        Models and optimizers, the same objects; lists if lists were passed.

    Raises:
        ValueError: if the level, the scale, a model or an optimizer is not supported; nothing has changed then.
    """
    level = by_name(opt_level)
    models, optimizers = _list(model), _list(optimizer)
    if num_losses < 1:
        raise ValueError(f"num_losses is {num_losses}; it must be at least 1")
    options = {"init_scale": init_scale, "growth_interval": growth_interval}
    limits = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    chosen = level.loss_scale if loss_scale is None else loss_scale
    scalers = [LossScaler(chosen, **options, **limits) for _ in range(num_losses)]  # type: ignore[arg-type]
    for each in models:
        check_model(each, level)
    _check_optimizers(optimizers, level)
    full: dict[torch.Tensor, torch.Tensor] = {}
    for each in models:
        full |= prepare_model(each, level, keep_fp32)
    amp = _Amp(scalers, {each: AmpStep(each, full if level.master_weights else {}) for each in optimizers})
    for each in optimizers:
        each.amp = amp
    return model, optimizer


def _amp(optimizers: Sequence[torch.optim.Optimizer]) -> _Amp:
    amps = {getattr(optimizer, "amp", None) for optimizer in optimizers}
    amp = amps.pop() if len(amps) == 1 else None
    if amp is None:
        raise ValueError("the optimizers were not initialized by one msamp.amp.initialize call; pass those that it returned, not copies")
    return amp


@contextmanager
def scale_loss(loss: torch.Tensor, optimizer: Optimizers, loss_id: int = 0, *, delay_unscale: bool = False) -> Iterator[torch.Tensor]:
    """Context with the scaled loss, for `backward()` inside it; on exit, `.grad` of `master_params` is the unscaled gradient.

    On exit, the new gradients are divided by the scale in FP32 and added to the existing ones. If one is infinite or NaN, the next `step()`
    of these optimizers is skipped, and a dynamic scale is halved. All of this runs on the device; only `step()` has a host sync. If the
    backward raises, the gradients do not change.

    Args:
        loss: any shape; FP32 inside the context.
        optimizer: the optimizer, or a list of all optimizers whose parameters this loss trains.
        loss_id: index of the loss scale, below `num_losses`.
        delay_unscale: keep the gradients scaled and accumulate the next micro-batch; for all micro-batches of a step but the last.

    Raises:
        ValueError: if the optimizers were not initialized together, `loss_id` is invalid, gradients are still scaled by another scale, a
            gradient is sparse, or there are no gradients.
    """
    optimizers = _list(optimizer)
    amp = _amp(optimizers)
    if not 0 <= loss_id < len(amp.scalers):
        raise ValueError(f"loss_id is {loss_id}; it must be in [0, {len(amp.scalers)}): initialize with a larger num_losses")
    scaler, steps = amp.scalers[loss_id], [amp.steps[each] for each in optimizers]
    scale = scaler.scale(loss.device)
    for step in steps:
        step.check_open(scale)
    for step in steps:
        step.open(scale)
    try:
        yield loss.float() * scale
        for step in steps:
            step.check_unscale()
    except BaseException:
        for step in steps:
            step.abandon()
        raise
    if delay_unscale:
        return
    flags = [flag for flag in [step.unscale() for step in steps] if flag is not None]
    if not flags:
        raise ValueError("no gradient reached the optimizer's parameters; call backward() on the scaled loss inside the context")
    overflow = torch.stack([flag.to(flags[0].device) for flag in flags]).any()
    scaler.update(overflow)
    for step in steps:
        step.overflows.append(overflow)


scaled_loss = scale_loss  # the slides' name


def master_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that `optimizer` updates, at O2 the FP32 masters. Clip their gradients after `scale_loss`.

    Raises:
        ValueError: if their gradients are still scaled.
    """
    step = _amp([optimizer]).steps[optimizer]
    step.check_unscaled()
    return step.params()


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return loss scales, skipped steps and masters of all optimizers that were initialized together; waits for the device.

    `loss_scaler<i>` is the scaler of loss i; `skipped_steps` and `master_weights` (at O2, the FP32 tensors themselves) have one entry per
    optimizer. Save it together with the `state_dict` of models and optimizers.
    """
    amp = _amp([optimizer])
    for step in amp.steps.values():
        step.adopt()
    return {
        **{f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(amp.scalers)},
        "skipped_steps": [step.skipped_steps for step in amp.steps.values()],
        "master_weights": [[master.detach() for master in step.masters] for step in amp.steps.values()],
    }


def load_state_dict(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state` to resume bit for bit, after the same `initialize` call, before or after models and optimizers load their own state.

    Raises:
        ValueError: if losses, optimizers or masters differ; nothing has changed then.
    """
    amp = _amp([optimizer])
    steps = list(amp.steps.values())
    scalers = sorted(key for key in state if key.startswith("loss_scaler"))
    if len(scalers) != len(amp.scalers):
        raise ValueError(
            f"the state has {len(scalers)} loss scales, but there are {len(amp.scalers)}; initialize with num_losses={len(scalers)}"
        )
    saved = [[tuple(x.shape) for x in masters] for masters in state["master_weights"]]
    here = [[tuple(master.shape) for master in step.masters] for step in steps]
    if saved != here:
        raise ValueError(
            f"the state has {[len(x) for x in saved]} master weights by optimizer, expected {[len(x) for x in here]} of the same shapes; "
            "initialize the same models and optimizers at the level of the saved run"
        )
    for i, scaler in enumerate(amp.scalers):
        scaler.check_state(state[f"loss_scaler{i}"])
    for i, scaler in enumerate(amp.scalers):
        scaler.load_state_dict(state[f"loss_scaler{i}"])
    for step, skipped, masters in zip(steps, state["skipped_steps"], state["master_weights"], strict=True):
        step.skipped_steps = skipped
        with torch.no_grad():
            for master, values in zip(step.masters, masters, strict=True):
                master.copy_(values)
        step.write_weights()
