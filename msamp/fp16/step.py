"""What amp adds to one optimizer: gradients unscaled, steps with an overflow skipped, FP32 master weights.

It works through the optimizer's own hooks, so that the object that the user built stays the optimizer: schedulers, `state_dict` and
`zero_grad` are what they were.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class AmpStep:
    """The gradients and masters of one optimizer.

    A backward pass writes scaled gradients between `open` and `unscale`; `unscale` leaves FP32 ones (FP16 where the parameter is)
    in `.grad` of what the optimizer updates, added to what was there before. With masters the FP16 gradients are given up then, and
    the masters' by `optimizer.step()`, so that no call of `zero_grad` can forget them.

    Args:
        optimizer: its groups hold the masters in place of the FP16 parameters from now on.
        full: FP16 parameter -> the FP32 values of its master; empty where the optimizer updates the model's parameters themselves.

    Attributes:
        skipped_steps: steps skipped so far.
        masters: master -> FP16 parameter of the model.
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
        self._scale: torch.Tensor | None = None  # of the gradients that wait to be unscaled
        self._aside: dict[torch.Tensor, torch.Tensor] = {}
        self._overflows: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def params(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(where backward leaves a gradient, what the optimizer updates by it)."""
        return ((self.masters.get(p, p), p) for p in self.params())

    def check_open(self, scale: torch.Tensor) -> None:
        """ValueError where a backward with this loss scale must not follow what is there."""
        if self._scale is not None and self._scale is not scale:
            raise ValueError(
                "gradients from before wait to be unscaled by another loss scale (of another loss_id, or changed since); "
                "leave their last scale_loss without delay_unscale first"
            )
        self._check_plain()
        for p in self.params() if self.masters else ():
            if p.dtype == torch.float16:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no master weight: add all groups before initialize")

    def _check_plain(self) -> None:
        if self._scale is None and any(p.grad is not None for p in self.masters.values()):
            raise ValueError("an FP16 weight has a gradient that no scale_loss unscaled: run every backward inside scale_loss")

    def open(self, scale: torch.Tensor) -> None:
        """Before a backward of a loss that was multiplied by `scale`: gradients that are unscaled already are put aside."""
        if self._scale is None:
            self._scale = scale
            self._aside = {p: p.grad for p in self.params() if p.grad is not None and p not in self.masters}
            for p in self._aside:
                p.grad = None

    def check_unscale(self) -> None:
        """ValueError for a gradient that cannot be unscaled."""
        for source, _ in self._pairs():
            if source.grad is not None and source.grad.is_sparse:
                raise ValueError(f"the gradient of a parameter of shape {tuple(source.shape)} is sparse; use dense embeddings")

    def abandon(self) -> None:
        """Give up the gradients that wait to be unscaled; those put aside come back."""
        for source, p in self._pairs():
            source.grad = self._aside.get(p)
        self._scale, self._aside = None, {}

    @torch.no_grad()
    def unscale(self) -> torch.Tensor | None:
        """Divide the new gradients by their loss scale, in FP32.

        Returns:
            bool 0-dim, whether one of them is infinite or NaN; None without gradients. No host sync.
        """
        found = [(p, source.grad.detach().float()) for source, p in self._pairs() if source.grad is not None]
        scale = self._scale
        self.abandon()
        if not found or scale is None:
            return None
        gradients = [g for _, g in found]
        overflow = ~nn.utils.get_total_norm(gradients, float("inf")).isfinite()
        for device in {g.device for g in gradients}:
            torch._foreach_div_([g for g in gradients if g.device == device], scale.to(device))
        for p, g in found:
            p.grad = g.to(p.dtype) if p.grad is None else p.grad.add_(g)
        return overflow

    def note(self, overflow: torch.Tensor) -> None:
        """The next step is skipped if `overflow` (bool 0-dim) says so."""
        self._overflows.append(overflow)

    def check_unscaled(self) -> None:
        """ValueError where gradients still wait to be unscaled."""
        if self._scale is not None:
            raise ValueError("the gradients are still multiplied by the loss scale: leave the step's last scale_loss without delay_unscale")

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ValueError("step was given a closure, and its backward would come after the overflow check: call step() without one")
        self.check_unscaled()
        self._check_plain()
        self.adopt()
        if self._overflows:
            device = self._overflows[0].device
            overflow = bool(torch.stack([flag.to(device) for flag in self._overflows]).any())  # the step's one host sync
            self._overflows = []
            if overflow:
                self.skipped_steps += 1
                for p in self.params():  # an optimizer leaves alone what has no gradient
                    p.grad = None

    def _after(self, *_: Any) -> None:
        for master in self.masters:
            master.grad = None
        self.write_weights()

    @torch.no_grad()
    def write_weights(self) -> None:
        """The model's FP16 weights become their masters, rounded."""
        if self.masters:
            torch._foreach_copy_(list(self.masters.values()), list(self.masters))
            self._versions = {master: p._version for master, p in self.masters.items()}

    @torch.no_grad()
    def adopt(self) -> None:
        """Copies weights written from outside (load_state_dict, an initialiser) into the masters. An element that equals its rounded master
        keeps the master's digits, so that the order in which a checkpoint is loaded does not matter."""
        for master, p in self.masters.items():
            if self._versions[master] != p._version:
                master.copy_(torch.where(p == master.to(p.dtype), master, p.float()))
                self._versions[master] = p._version
