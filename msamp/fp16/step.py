"""Amp for one optimizer: it unscales gradients, skips steps with an overflow, and maintains FP32 master weights.

It uses the optimizer's step hooks, so the user's optimizer object remains in use, with its schedulers, `state_dict` and `zero_grad`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class AmpStep:
    """The gradients and masters of one optimizer.

    A backward pass writes scaled gradients between `open` and `unscale`. `unscale` adds the unscaled gradients, in FP32 (or FP16 if the
    parameter is FP16), to `.grad` of the tensors that the optimizer updates. With masters it then drops the FP16 gradients, and
    `optimizer.step()` drops the masters', so a missing `zero_grad` has no effect; one drops FP16 gradients of other optimizers' losses.

    Args:
        optimizer: its groups contain the masters instead of the FP16 parameters from now on.
        full: FP16 parameter -> the FP32 values of its master; empty if the optimizer updates the model's parameters directly.

    Attributes:
        skipped_steps: steps skipped so far.
        masters: master -> FP16 parameter of the model.
        overflows: bool 0-dim each; the next step is skipped if one is true.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, full: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.skipped_steps = 0
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        for group in optimizer.param_groups:
            masters = {p: nn.Parameter(full[p], p.requires_grad) for p in group["params"] if p in full}
            self.masters |= {master: p for p, master in masters.items()}
            for p in masters.keys() & optimizer.state.keys():
                optimizer.state[masters[p]] = optimizer.state.pop(p)
            group["params"] = [masters.get(p, p) for p in group["params"]]
        self._versions = {master: p._version for master, p in self.masters.items()}
        self._scale: torch.Tensor | None = None  # loss scale of the gradients that are not unscaled yet
        self._aside: dict[torch.Tensor, torch.Tensor] = {}
        self.overflows: list[torch.Tensor] = []
        if self.masters:
            optimizer.zero_grad = functools.partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def params(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (parameter to which backward writes the gradient, tensor that the optimizer updates)."""
        return ((self.masters.get(p, p), p) for p in self.params())

    def check_open(self, scale: torch.Tensor) -> None:
        """Raise a ValueError if a backward with this loss scale must not follow the existing gradients."""
        if self._scale is not None and self._scale is not scale:
            raise ValueError(
                "earlier gradients are still scaled by another loss scale (of another loss_id, or from before it changed); "
                "run their last scale_loss without delay_unscale first"
            )
        self._check_plain()
        for p in self.params() if self.masters else ():
            if p.dtype == torch.float16:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no master weight; add all groups before initialize")

    def _check_plain(self) -> None:
        if self._scale is None and any(p.grad is not None for p in self.masters.values()):
            raise ValueError("an FP16 weight has a gradient that no scale_loss unscaled; run every backward inside scale_loss")

    def open(self, scale: torch.Tensor) -> None:
        """Prepare a backward of a loss that is multiplied by `scale`: set aside gradients that are already unscaled."""
        if self._scale is None:
            self._scale = scale
            self._aside = {p: p.grad for p in self.params() if p.grad is not None and p not in self.masters}
            for p in self._aside:
                p.grad = None

    def check_unscale(self) -> None:
        """Raise a ValueError for a gradient that cannot be unscaled."""
        for source, _ in self._pairs():
            if source.grad is not None and source.grad.is_sparse:
                raise ValueError(f"the gradient of a parameter of shape {tuple(source.shape)} is sparse; use dense embeddings")

    def abandon(self) -> None:
        """Drop the gradients that are still scaled, and restore those that were set aside."""
        for source, p in self._pairs():
            source.grad = self._aside.get(p)
        self._scale, self._aside = None, {}

    @torch.no_grad()
    def unscale(self) -> torch.Tensor | None:
        """Divide the new gradients by their loss scale, in FP32.

        Returns:
            bool 0-dim, whether one of them is infinite or NaN; None without gradients. No host sync.
        """
        unscaled = [(p, source.grad.detach().float()) for source, p in self._pairs() if source.grad is not None]
        scale = self._scale
        self.abandon()
        if not unscaled or scale is None:
            return None
        gradients = [g for _, g in unscaled]
        overflow = ~nn.utils.get_total_norm(gradients, float("inf")).isfinite()
        for device in {g.device for g in gradients}:
            torch._foreach_div_([g for g in gradients if g.device == device], scale.to(device))
        for p, g in unscaled:
            p.grad = g.to(p.dtype) if p.grad is None else p.grad.add_(g)
        return overflow

    def check_unscaled(self) -> None:
        """Raise a ValueError if gradients are still scaled."""
        if self._scale is not None:
            raise ValueError("the gradients are still scaled by the loss scale; run the step's last scale_loss without delay_unscale")

    def _zero_grad(self, masters: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for p in self.masters.values():
            p.grad = None
        masters(*args, **kwargs)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ValueError("step got a closure, whose backward would run after the overflow check; call step() without one")
        self.check_unscaled()
        self._check_plain()
        self.adopt()
        if self.overflows:
            device = self.overflows[0].device
            overflow = bool(torch.stack([flag.to(device) for flag in self.overflows]).any())  # the step's one host sync
            self.overflows = []
            if overflow:
                self.skipped_steps += 1
                for p in self.params():  # an optimizer skips parameters without a gradient
                    p.grad = None

    def _after(self, *_: Any) -> None:
        for master in self.masters:
            master.grad = None
        self.write_weights()
        torch.clear_autocast_cache()  # within somebody's outer block, O1 would go on with casts of the old weights

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copy the masters to the model's FP16 weights, rounded."""
        if self.masters:
            torch._foreach_copy_(list(self.masters.values()), list(self.masters))
            self._versions = {master: p._version for master, p in self.masters.items()}

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy weights that something else wrote (load_state_dict, an initializer) to the masters. An element that equals its rounded
        master keeps the master's precision, so a checkpoint can be loaded in any order."""
        for master, p in self.masters.items():
            if self._versions[master] != p._version:
                master.copy_(torch.where(p == master.to(p.dtype), master, p.float()))
                self._versions[master] = p._version
