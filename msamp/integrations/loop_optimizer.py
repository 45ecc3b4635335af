"""The optimizer of a loop of one's own: FP8AdamW with what else a step is, the average of the gradients and the new scales of the casts.

Both belong to the object and not to hooks on it, which torch drops from copies and pickles. A copy of (model, optimizer) made together
trains on as the two did. On several processes there is no copy: the synchroniser of the gradients hangs on the parameters of its model.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.grad_sync import GradSync
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import FP32_STATES, Recipe, StateFormats
from msamp.optim.adamw import FP8AdamW
from msamp.optim.states import is_scaled


def states_of(p: torch.Tensor, recipe: Recipe) -> StateFormats:
    """The formats of gradient, master and moments of a parameter of a converted model."""
    if is_scaled(p):
        return recipe.states
    if p.dim() <= 1:
        return recipe.vectors
    return FP32_STATES if recipe.fp8_gradients else recipe.states


class LoopOptimizer(FP8AdamW):
    """What `msamp.initialize` returns.

    A group without `formats`, one added later too, has those of the recipe for each of its parameters; the others' formats are not asked.

    Args:
        params: parameters or groups, of a converted model.
        recipe: of the formats.
        scaling: the scales of the model's linear layers, which a step rolls.
        grad_sync: averages gradients over several processes; None on one.
        settings: FP8AdamW's others.

    Attributes:
        grad_sync: as given.
    """

    def __init__(
        self, params: Iterable[Any], recipe: Recipe, scaling: ScalingState, grad_sync: GradSync | None = None, **settings: Any
    ) -> None:
        self.recipe, self.scaling, self.grad_sync = recipe, scaling, grad_sync
        super().__init__(params, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As FP8AdamW's, with the recipe's formats where the group has none, and a name for each parameter where the others have names."""
        params = param_group["params"]
        if not isinstance(params, set):
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            param_group["params"] = params
            param_group.setdefault("formats", [states_of(p, self.recipe) for p in tensors])
            named = any(isinstance(p, tuple) for p in params) or "param_names" in param_group
            if not named and any("param_names" in group for group in self.param_groups):
                param_group["param_names"] = [f"parameter {i} of group {len(self.param_groups)}" for i in range(len(params))]
        super().add_param_group(param_group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes whose casts share their scales; None where there is one."""
        return None if self.grad_sync is None else self.grad_sync.peers.group

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all micro-batches of a step but the last: gradients add up on this rank and none leaves. Without effect on one process."""
        return contextlib.nullcontext() if self.grad_sync is None else self.grad_sync.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that have left for the other processes are dropped too. Collective where a backward has run since."""
        super().zero_grad(set_to_none)
        if self.grad_sync is not None:
            self.grad_sync.discard()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """The gradients' average over the processes, FP8AdamW's update, and the next scales of the casts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.grad_sync is not None:
            self.grad_sync.finish()
        self.update()
        self.scaling.roll(self.group)
        if self.grad_sync is not None:
            self.grad_sync.clear()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        if self.grad_sync is not None:
            raise ValueError(
                "an optimizer of several processes cannot be copied or pickled, since the synchroniser of its gradients hangs on the "
                "parameters of its model; save state_dict(), or build the copy's own with msamp.initialize and load it there"
            )
        return {**super().__getstate__(), "recipe": self.recipe, "scaling": self.scaling, "grad_sync": None}
