"""Hugging Face transformers' Trainer on any number of processes, by changing one import.

    from msamp.integrations.transformers import Trainer

    Trainer(model, arguments, train_dataset=rows, recipe="O2").train()

The Trainer saves plain weights for `from_pretrained`, and the optimizer's states unchanged. A resumed run loads these weights and states;
the windows of delayed scaling restart.
"""

from typing import Any, cast

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from msamp.integrations.accelerate import Accelerator
from msamp.integrations.initialize import initialize
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.saving import save_plain
from msamp.numerics.recipe import Recipe


class Trainer(transformers.Trainer):
    """transformers' Trainer, which passes its model and optimizer to `msamp.initialize`.

    To use other arguments, call `msamp.initialize` yourself, and pass the model it returns and `optimizers=(optimizer, None)`.

    Args:
        args: transformers' own.
        recipe: of `msamp.initialize`.
        settings: transformers' own.

    Raises:
        ValueError: for several GPUs in one process, or as in `msamp.integrations.accelerate.Accelerator`.
    """

    def __init__(self, *args: Any, recipe: str | Recipe | None = None, **settings: Any) -> None:
        self.recipe = recipe
        super().__init__(*args, **settings)
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
            _, optimizer = initialize(held, optimizer, self.recipe)
            self.optimizer = optimizer
            if not isinstance(held, transformers.PreTrainedModel):
                save_plain(held, optimizer)
        return cast("torch.optim.Optimizer", self.optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and self.optimizer is not None:
            self.optimizer.state_dict()  # collective under ZeRO
        super()._save_optimizer_and_scheduler(output_dir)
