"""`msamp.PrecisionGuard`: a guard of FP8 layers in your own loop."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.nn.expert_layer import Experts
from msamp.nn.linear import FP8Linear
from msamp.nn.precision_guard import EVERY, RAISE_AFTER, RETURN_AFTER, Bounds, Change, LayerGuard, check_state, linear_layers

_LOG = logging.getLogger("msamp")


class PrecisionGuard(LayerGuard):
    """Computes a linear layer in BF16 while its casts to FP8 lose too much (`msamp.nn.precision_guard`).

        model, optimizer = msamp.initialize(model, optimizer, recipe="O2")
        guard = msamp.PrecisionGuard(model, optimizer)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()

    Each change is logged as a warning of the logger `msamp`, on the first rank. If you capture CUDA graphs yourself, run the steps for
    which `armed` is set eagerly, and drop them after a `step` that returns changes; capture again once `raised` is empty.

    The model's state does not contain which layers are raised: save `state_dict()` too. A guard of one process can be copied and pickled
    together with its model.

    Args:
        model: after `msamp.initialize` or `msamp.convert`.
        optimizer: that `msamp.initialize` returned; its processes decide together. None: this process decides alone.
        saturation, underflow, sqnr_db, shrinkage: `Bounds`.
        every: steps from one check to the next.
        raise_after: bad checks in a row after which a layer is raised.
        return_after: good checks in a row after which it returns.

    Attributes:
        steps: number of calls of `step`.

    Raises:
        ValueError: for a number out of range, a model without FP8 layers or sharded by FSDP2, or layers that another guard has raised.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: LoopOptimizer | None = None,
        *,
        saturation: float = Bounds.saturation,
        underflow: float = Bounds.underflow,
        sqnr_db: float = Bounds.sqnr_db,
        shrinkage: float = Bounds.shrinkage,
        every: int = EVERY,
        raise_after: int = RAISE_AFTER,
        return_after: int = RETURN_AFTER,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, LoopOptimizer):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}; pass the one that msamp.initialize returned, or None")
        for name, module in model.named_modules():
            if isinstance(module, FP8Linear) and type(module.weight).__name__ == "DTensor":  # by name, to avoid importing FSDP
                raise ValueError(f"{name} is sharded by FSDP2, whose weights cannot be raised; use msamp.initialize(..., zero=True)")
        super().__init__(
            dict(linear_layers(model.named_modules())),
            bounds=Bounds(saturation=saturation, underflow=underflow, sqnr_db=sqnr_db, shrinkage=shrinkage),
            every=every,
            raise_after=raise_after,
            return_after=return_after,
            group=None if optimizer is None else optimizer.group,
        )
        experts = [name for name, module in model.named_modules() if isinstance(module, Experts)]
        if experts:
            warnings.warn(f"the guard leaves out {len(experts)} modules of experts, such as {experts[0]}", stacklevel=2)
        self.steps = 0
        self._arm_if_due()

    def step(self) -> list[Change]:
        """Call it after each `optimizer.step()`. After a measured step it is collective, and waits for the device.

        Returns:
            The layers that it raised or returned to FP8.

        Raises:
            ValueError: if no layer ran in a step that should be measured.
        """
        self.steps += 1
        changes = self.check(self.steps) if self.armed else []
        if self.group is None or dist.get_rank(self.group) == 0:
            for change in changes:
                _LOG.warning("step %d: %s", change.step, change)
        self._arm_if_due()
        return changes

    def _arm_if_due(self) -> None:
        if self.due(self.steps + 1):
            self.arm()

    def state_dict(self) -> dict[str, Any]:
        """As `LayerGuard.state_dict`, with the number of steps."""
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state)
        steps = state.get("steps")
        if type(steps) is not int or steps < 0:
            raise ValueError(f"the guard's state has steps {steps!r}; it must be what state_dict() of a msamp.PrecisionGuard returned")
        super().load_state_dict(state)
        self.steps = steps
        self._arm_if_due()
