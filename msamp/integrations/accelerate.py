"""Hugging Face accelerate on any number of processes, by changing one import.

    from msamp.integrations.accelerate import Accelerator

    accelerator = Accelerator(recipe="O2")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

accelerate's own `prepare` wraps a model in DistributedDataParallel, which does not support FP8 weights. This one passes the model and its
optimizer to `msamp.initialize` instead, whose optimizer averages the gradients and also implements `accumulate`, `no_sync` and gradient
clipping.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from msamp.integrations.clipping import clip_grad_norm_
from msamp.integrations.initialize import initialize
from msamp.integrations.loop_optimizer import LoopOptimizer, optimizers_of
from msamp.integrations.saving import fp8_state_dict, plain_state_dict, save_plain
from msamp.numerics.recipe import Recipe

_ALONE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator with `msamp.initialize` as its `prepare`.

    To use other arguments, call `msamp.initialize` yourself on a model that is on `accelerator.device`, and prepare what it returns.
    `save_model` writes plain weights, and `save_state` the exact ones, with FP8 as 1 byte.

    Args:
        args: accelerate's own.
        recipe: of `msamp.initialize`.
        settings: accelerate's own.

    Raises:
        ValueError: for a distributed type or a precision of accelerate that does not support FP8 weights.
    """

    def __init__(self, *args: Any, recipe: str | Recipe | None = None, **settings: Any) -> None:
        named = {type(handler).__name__ for handler in settings.get("kwargs_handlers") or ()}
        backend = "MSAMP" if "MSAMPRecipeKwargs" in named else os.environ.get("ACCELERATE_FP8_BACKEND", "")
        _check_precision(str(settings.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")).lower(), backend)
        super().__init__(*args, **settings)
        self.recipe = recipe
        self.check()

    def check(self) -> None:
        """Raise a ValueError for settings of accelerate that do not support FP8 weights."""
        if self.distributed_type not in _ALONE:
            raise ValueError(
                f"accelerate is set to {self.distributed_type.value}, which does not support FP8 weights; choose "
                f"{DistributedType.MULTI_GPU.value}: msamp averages the gradients itself, and O3 shards the optimizer over the processes"
            )
        _check_precision(self.mixed_precision, str(getattr(self.fp8_backend, "value", self.fp8_backend)))

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like accelerate's, but first pass one model and one optimizer among `args` to `msamp.initialize`."""
        return super().prepare(*self._initialized(args), device_placement=device_placement)

    def _initialized(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        models = [x for x in args if isinstance(x, nn.Module)]
        fresh = [x for x in args if isinstance(x, torch.optim.Optimizer) and not isinstance(_inner(x), LoopOptimizer)]
        if not fresh:
            return args
        if len(models) != 1 or len(fresh) != 1:
            raise ValueError(
                f"prepare got {len(models)} models and {len(fresh)} optimizers to convert; pass one of each, or call "
                "msamp.initialize on each pair and prepare what it returns"
            )
        model = models[0].to(self.device) if self.device_placement else models[0]
        model, low = initialize(model, fresh[0], self.recipe)
        save_plain(model, low)
        return tuple(low if x is fresh[0] else x for x in args)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Like accelerate's, without DistributedDataParallel around a model of `msamp.initialize`."""
        if optimizers_of(model.parameters()):
            device_placement, evaluation_mode = False, True  # `to` would drop the hooks that send gradients
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Like accelerate's, but without moving states: ours are on their parameters' device, and under ZeRO no process could load all."""
        placed = False if isinstance(_inner(optimizer), LoopOptimizer) else device_placement
        return super().prepare_optimizer(optimizer, device_placement=placed)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Like accelerate's."""
        with contextlib.ExitStack() as stack:
            for context in [owner.no_sync() for owner in optimizers_of(model.parameters())] or [super().no_sync(model)]:
                stack.enter_context(context)
            yield

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Like accelerate's, on the average over the processes."""
        params = list(parameters)
        return (clip_grad_norm_ if optimizers_of(params) else super().clip_grad_norm_)(params, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Like accelerate's: plain weights for `save_model`, and exact ones for `save_state`, which calls it without `unwrap`."""
        owners = optimizers_of(model.parameters())
        if not owners:
            return super().get_state_dict(model, unwrap=unwrap)
        model = self.unwrap_model(model, keep_torch_compile=False)
        return plain_state_dict(model, owners[0]) if unwrap else fp8_state_dict(model)


def _check_precision(mixed: str, backend: str) -> None:
    """Raise a ValueError in our words; accelerate looks for a package of FP8 before it reports anything else."""
    if backend.upper() == "MSAMP":
        raise ValueError(
            "accelerate's fp8_backend MSAMP and its MSAMPRecipeKwargs are for Microsoft's MS-AMP, and this is another package: delete "
            "fp8_config from accelerate's YAML, set mixed_precision to 'no' or 'bf16', and name the level, as in Accelerator(recipe='O2')"
        )
    if mixed in ("fp8", "fp16"):
        instead = "the recipe converts the layers to FP8" if mixed == "fp8" else "loss scaling is in msamp.amp"
        raise ValueError(f"mixed_precision is {mixed!r}; it must be 'no' or 'bf16': {instead}")


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
