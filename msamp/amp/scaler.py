"""The loss scale c: gradients of c L lie in FP16's range, and divided by c they are those of L (Micikevicius et al. 2017, section 3.2)."""

from typing import Any

import torch


class LossScaler:
    """A loss scale, static or dynamic; it lives on the device, so that following it makes nobody wait.

    Dynamic: halved at every overflow, doubled after `growth_interval` good steps in a row.

    Args:
        loss_scale: "dynamic", or a positive constant (the slides: 8 typically works).
        init_scale: where a dynamic scale starts.
        growth_interval: good steps before a dynamic scale doubles.
        min_loss_scale, max_loss_scale: a dynamic scale stays within these.

    Raises:
        ValueError: for a scale that is not a positive number, an interval below 1, or a start outside the limits.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        min_loss_scale: float = 2.0**-24,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if not self.dynamic and (isinstance(loss_scale, str) or not 0 < loss_scale < float("inf")):
            raise ValueError(f'loss_scale is {loss_scale!r}; it must be "dynamic" or a number greater than 0')
        if growth_interval < 1:
            raise ValueError(f"growth_interval is {growth_interval}; it must be at least 1 good step")
        if not 0 < min_loss_scale <= init_scale <= max_loss_scale < float("inf"):
            raise ValueError(
                f"init_scale is {init_scale}, min_loss_scale {min_loss_scale}, max_loss_scale {max_loss_scale}; "
                "they must be greater than 0 and finite, with the start between the other two"
            )
        self.growth_interval = growth_interval
        self.limits = (min_loss_scale, max_loss_scale)
        self._scale = torch.tensor(init_scale if self.dynamic else float(loss_scale), dtype=torch.float32)
        self._good = torch.zeros((), dtype=torch.int32)

    def scale(self, device: torch.device) -> torch.Tensor:
        """FP32 0-dim on `device`; the same object until the scale may have changed, and never written to."""
        if self._scale.device != device:
            self._scale, self._good = self._scale.to(device), self._good.to(device)
        return self._scale

    def update(self, overflow: torch.Tensor) -> None:
        """Look at one step's gradients.

        Args:
            overflow: bool 0-dim on any device, whether one of them is infinite or NaN.
        """
        if not self.dynamic:
            return
        overflow = overflow.to(self._scale.device)
        grown = ~overflow & (self._good + 1 >= self.growth_interval)
        moved = torch.where(overflow, self._scale / 2, torch.where(grown, self._scale * 2, self._scale))
        self._scale = moved.clamp(*self.limits)
        self._good = (self._good + 1).masked_fill(overflow | grown, 0)

    def state_dict(self) -> dict[str, Any]:
        """`loss_scale`, and `unskipped`, the good steps since it last changed; waits for the device."""
        return {"loss_scale": self._scale.item(), "unskipped": int(self._good)}

    def check_state(self, state: dict[str, Any]) -> None:
        """ValueError for a saved state that this scaler cannot go on from."""
        saved, (low, high) = state["loss_scale"], self.limits
        if self.dynamic and not low <= saved <= high:
            raise ValueError(f"the saved loss scale is {saved}; this one stays in [{low}, {high}]: initialize with wider limits")
        if not self.dynamic and saved != self._scale.item():
            raise ValueError(f"the saved loss scale is {saved}, the static one here {self._scale.item()}: initialize with the saved one")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; ValueError as in `check_state`, nothing has changed then."""
        self.check_state(state)
        self._scale = torch.tensor(state["loss_scale"], dtype=torch.float32, device=self._scale.device)
        self._good = torch.tensor(state["unskipped"], dtype=torch.int32, device=self._scale.device)
