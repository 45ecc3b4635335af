"""Hugging Face transformers' Trainer on any number of processes, by changing one import.

    from msamp.integrations.transformers import Trainer

    Trainer(model, arguments, train_dataset=rows, recipe="O2").train()

The Trainer saves plain weights for `from_pretrained`, and the optimizer's states unchanged. A resumed run loads these weights and states;
the windows of delayed scaling restart.
"""

import contextlib
import warnings
from typing import Any, cast
from unittest import mock

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from msamp.integrations.accelerate import Accelerator
from msamp.integrations.capture import CapturedStep
from msamp.integrations.capture import capture as capture_step
from msamp.integrations.initialize import initialize
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.saving import save_plain
from msamp.numerics.recipe import Recipe


class _Stepped(AcceleratedOptimizer):
    """An optimizer whose step is part of a captured step, so that the Trainer's call does nothing."""

    def step(self, closure: Any = None) -> None:
        pass


class Trainer(transformers.Trainer):
    """transformers' Trainer, which passes its model and optimizer to `msamp.initialize`.

    To use other arguments, call `msamp.initialize` yourself, and pass the model it returns and `optimizers=(optimizer, None)`.

    Args:
        args: transformers' own.
        recipe: of `msamp.initialize`.
        capture: run each step, from its first micro-batch to the update, by `msamp.capture`. Callbacks before the update
            (`on_pre_optimizer_step`) then run after it, and a step's loss is that of all its micro-batches. A trainer of another library
            that prepares inputs itself, such as TRL's GRPO, which generates there, stays eager, with a warning.
        settings: transformers' own.

    Raises:
        ValueError: for several GPUs in one process, `capture` with transformers before version 5, or as in
            `msamp.integrations.accelerate.Accelerator`.
    """

    def __init__(self, *args: Any, recipe: str | Recipe | None = None, capture: bool = False, **settings: Any) -> None:
        self.recipe, self.captures = recipe, capture
        self._captured: CapturedStep | None = None
        self._waiting: list[dict[str, Any]] = []  # micro-batches of this step
        if capture and not hasattr(transformers.Trainer, "_get_grad_norm"):
            raise ValueError(f"capture=True requires transformers 5, this is {transformers.__version__}; leave it out")
        super().__init__(*args, **settings)
        if capture and super()._prepare_inputs.__func__ is not transformers.Trainer._prepare_inputs:  # type: ignore[attr-defined]
            self.captures = False
            why = "its own _prepare_inputs, which may follow a count that no graph repeats"
            warnings.warn(f"{type(self).__name__} has {why}: steps are eager", stacklevel=2)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process has {self.args.n_gpu} GPUs, but DataParallel does not support FP8 weights; start one per GPU with torchrun"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Like transformers', with our `Accelerator`."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # keeps the object that transformers configured
        self.accelerator.recipe = self.recipe
        self.accelerator.check()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Like transformers', through `msamp.initialize`."""
        optimizer = super().create_optimizer(model)
        if not isinstance(optimizer, AcceleratedOptimizer | LoopOptimizer):
            held = cast("nn.Module", self.model)
            _, self.optimizer = initialize(held, optimizer, self.recipe)
            if not isinstance(held, transformers.PreTrainedModel):
                save_plain(held, self.optimizer)
        return cast("torch.optim.Optimizer", self.optimizer)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Like transformers'. With `capture` the optimizer changes its class before: a scheduler wraps the `step` that it finds."""
        if self.captures and isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer.__class__ = _Stepped
        return super().create_scheduler(num_training_steps, optimizer)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers'. Frees a captured step's graphs at the end, without which process groups cannot be destroyed."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._captured is not None:
                self._captured.release()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        """Like transformers'; with `capture`, run all micro-batches and the update with the last one."""
        if not self.captures:
            return super().training_step(model, inputs, num_items_in_batch)
        self._waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        if self._captured is None or self._captured.model is not model:
            self.optimizer.__class__ = _Stepped  # keeps the object that accelerate prepared
            self._captured = capture_step(model, cast("torch.optim.Optimizer", self.optimizer), self._micro_batches)
        model.train()
        batches, self._waiting = self._waiting, []
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=self.args.device)
        loss, self._norm = self._captured(batches, items)
        return cast("torch.Tensor", loss)

    def _micro_batches(self, batches: list[dict[str, Any]], items: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward and backward of a step; return the loss, and the norm of the gradients before they were clipped."""
        model, losses = cast("CapturedStep", self._captured).model, []
        with mock.patch.object(self, "_prepare_inputs", lambda inputs: inputs):  # they are prepared; a method may not be idempotent
            for number, inputs in enumerate(batches, 1):
                with contextlib.nullcontext() if number == len(batches) else self.accelerator.no_sync(model):
                    losses.append(super().training_step(model, inputs, items))
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm or float("inf"))
        return torch.stack(losses).sum(), norm

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm if self.captures else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm if self.captures else super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and self.optimizer is not None:
            self.optimizer.state_dict()  # collective under ZeRO
        super()._save_optimizer_and_scheduler(output_dir)
