"""The loss scale c: gradients of c L are in the range of FP16, and dividing them by c gives the gradients of L (Micikevicius et al. 2017,
section 3.2)."""

from typing import Any

import torch


class LossScaler:
    """A static or dynamic loss scale on the device, so that updates do not make the host wait.

    A dynamic scale is halved at every overflow and doubled after `growth_interval` good steps in a row. With `hysteresis` h, the first
    h - 1 overflows since it last doubled do not halve it.

    Args:
        loss_scale: "dynamic", or a positive constant (the slides: 8 typically works).
        init_scale: initial value of a dynamic scale.
        growth_interval: good steps before a dynamic scale doubles.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.
        hysteresis: number of overflows until it is halved, as in Megatron-LM; 1: every one.
        in_place: keep the scale in the same memory, for CUDA graphs; callers must then not hold an old scale.

    Raises:
        ValueError: if a scale is not positive, the interval or hysteresis is below 1, or the initial scale is outside the limits.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        min_loss_scale: float = 2.0**-24,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
        in_place: bool = False,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if not self.dynamic and (isinstance(loss_scale, str) or not 0 < loss_scale < float("inf")):
            raise ValueError(f'loss_scale is {loss_scale!r}; it must be "dynamic" or a number greater than 0')
        if growth_interval < 1:
            raise ValueError(f"growth_interval is {growth_interval}; it must be at least 1 good step")
        if hysteresis < 1:
            raise ValueError(f"hysteresis is {hysteresis}; it must be at least 1 overflow")
        if not 0 < min_loss_scale <= init_scale <= max_loss_scale < float("inf"):
            raise ValueError(
                f"init_scale is {init_scale}, min_loss_scale {min_loss_scale}, max_loss_scale {max_loss_scale}; "
                "they must be greater than 0 and finite, with the start between the other two"
            )
        self.growth_interval = growth_interval
        self.limits = (min_loss_scale, max_loss_scale)
        self.hysteresis, self.in_place = hysteresis, in_place
        self._scale = torch.tensor(init_scale if self.dynamic else float(loss_scale), dtype=torch.float32, device="cpu")
        self._good = torch.zeros((), dtype=torch.int32, device="cpu")
        self._left = torch.tensor(hysteresis, dtype=torch.int32, device="cpu")  # overflows left until the scale is halved

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the scale, FP32 0-dim on `device`. Unless `in_place`, it is the same object until the scale may have changed, and is never
        written to."""
        if self._scale.device != device:
            self._scale, self._good, self._left = self._scale.to(device), self._good.to(device), self._left.to(device)
        return self._scale

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in FP32."""
        return loss.float() * self.scale(loss.device)

    def update(self, overflow: torch.Tensor) -> None:
        """Adapt the scale after a step.

        Args:
            overflow: bool 0-dim on any device, whether a gradient was infinite or NaN.
        """
        if not self.dynamic:
            return
        overflow = overflow.to(self._scale.device)
        grown = ~overflow & (self._good + 1 >= self.growth_interval)
        left = (self._left - overflow.int()).clamp(min=0).masked_fill(grown, self.hysteresis)
        halved = overflow & (left == 0)
        moved = torch.where(halved, self._scale / 2, torch.where(grown, self._scale * 2, self._scale))
        self._become(moved.clamp(*self.limits), (self._good + 1).masked_fill(overflow | grown, 0), left)

    def _become(self, scale: torch.Tensor, good: torch.Tensor, left: torch.Tensor) -> None:
        if self.in_place:
            self._scale.copy_(scale)
            self._good.copy_(good)
            self._left.copy_(left)
        else:
            self._scale, self._good, self._left = scale, good, left

    def state_dict(self) -> dict[str, Any]:
        """Return `loss_scale`, `unskipped` good steps since it last changed, and `overflows_left` until it is halved; waits for the
        device."""
        return {"loss_scale": self._scale.item(), "unskipped": int(self._good), "overflows_left": int(self._left)}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError for a saved state from which this scaler cannot resume."""
        saved, (low, high) = state["loss_scale"], self.limits
        if self.dynamic and not low <= saved <= high:
            raise ValueError(f"the saved loss scale is {saved}, but the limits are [{low}, {high}]; initialize with wider limits")
        if not self.dynamic and saved != self._scale.item():
            raise ValueError(
                f"the saved loss scale is {saved}, but the static scale is {self._scale.item()}; initialize with the saved one"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`; ValueError as in `check_state`, in which case nothing has changed."""
        self.check_state(state)
        device = self._scale.device
        left = min(state.get("overflows_left", self.hysteresis), self.hysteresis)  # Apex does not save it
        self._become(
            torch.tensor(state["loss_scale"], dtype=torch.float32, device=device),
            torch.tensor(state["unskipped"], dtype=torch.int32, device=device),
            torch.tensor(left, dtype=torch.int32, device=device),
        )
