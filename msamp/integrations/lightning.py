"""Lightning on any number of processes, with one argument of its Trainer.

    from msamp.integrations.lightning import Strategy

    class Module(lightning.LightningModule):
        def configure_optimizers(self):
            _, optimizer = msamp.initialize(self, torch.optim.AdamW(self.parameters(), lr=1e-3), "O2")
            return optimizer

    lightning.Trainer(strategy=Strategy()).fit(Module(), rows)

Lightning's DDPStrategy wraps the module in DistributedDataParallel, which does not support FP8 weights, and all of its strategies load a
checkpoint before `configure_optimizers`, when the model has no scales. This strategy does neither. Its checkpoints contain plain weights in
`state_dict`, for `load_from_checkpoint` and other strategies, and in addition the exact ones, from which it resumes bit for bit.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from msamp.integrations.capture import capture as capture_step
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.saving import exact_state_dict, plain_state_dict
from msamp.nn.linear import transposed_weights
from msamp.nn.scaling_state import LinearScaling

_EXACT = "msamp_state_dict"


class Strategy(DDPStrategy):
    """Lightning's DDPStrategy for a module whose `configure_optimizers` returns the optimizer of `msamp.initialize`.

    `gradient_clip_val` clips the average over the processes.

    Args:
        settings: DDPStrategy's own, without DistributedDataParallel's.

    Raises:
        ValueError: at `fit`, if there is not exactly one optimizer from `msamp.initialize`, it lacks a parameter of the module that
            requires a gradient, the precision is FP16 with loss scaling, or a callback would average weights with mismatched tensors.
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Restore after setup, when the layers are in FP8."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Like DDPStrategy's, without DistributedDataParallel."""
        if str(trainer.precision).startswith("16"):
            raise ValueError(
                f"precision is {trainer.precision!r}, but FP16 with loss scaling is in msamp.amp; use '32-true', 'bf16-mixed' or "
                "'bf16-true'"
            )
        super().setup(trainer)
        if self.optimizers:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                self._check_average(callback)

    def configure_ddp(self) -> None:
        """Do nothing: the optimizer averages the gradients."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Like Lightning's."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        foreign = [type(optimizer).__name__ for optimizer in self.optimizers if not isinstance(optimizer, LoopOptimizer)]
        if foreign or len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {', '.join(foreign) or len(self.optimizers)}; msamp's strategy requires one optimizer, the "
                "one that msamp.initialize returns"
            )
        # `setup` rejects FP16, so no GradScaler is used; Lightning would not clip the gradients of an optimizer that supports one.
        self.optimizers[0]._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        held = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
        for name, p in self.lightning_module.named_parameters():
            if p.requires_grad and id(p) not in held:
                raise ValueError(
                    f"{name} requires a gradient but is not in the optimizer, so its gradient would not be averaged over the processes; "
                    "pass msamp.initialize the whole module and all its parameters, or set requires_grad to False"
                )

    def _check_average(self, callback: Callback) -> None:
        assert self.lightning_module is not None
        if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            return
        kind, way = type(callback).__name__, "average a msamp.float_copy(model) with torch.optim.swa_utils.AveragedModel instead"
        transposed = next(iter(transposed_weights(self.lightning_module)), None)
        if transposed is not None:
            raise ValueError(f"{kind} would average {transposed} with its transpose, since msamp.initialize transposed it; {way}")
        scales = {id(x) for m in self.lightning_module.modules() if isinstance(m, LinearScaling) for x in m.buffers()}
        other = next((name for name, x in self.lightning_module.named_buffers() if id(x) not in scales), None)
        if isinstance(callback, WeightAveraging) and other is not None:
            raise ValueError(
                f"{kind} matches buffers by their order and would mix {other} with scales of FP8 layers; use StochasticWeightAveraging, "
                f"which ignores buffers, or {way}"
            )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for all micro-batches of a step but the last."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())  # type: ignore[attr-defined]
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return plain weights, from the masters. Collective under ZeRO."""
        assert self.lightning_module is not None
        if not self.optimizers:
            return super().lightning_module_state_dict()
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, LoopOptimizer)
        return plain_state_dict(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Like Lightning's, plus the exact weights if training can resume from the checkpoint."""
        assert self.lightning_module is not None
        if self.optimizers and "optimizer_states" in checkpoint:
            checkpoint = {**checkpoint, _EXACT: exact_state_dict(self.lightning_module)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Like Lightning's, but load the exact weights if the checkpoint has them and they match the model."""
        if self.optimizers and _EXACT in checkpoint:
            checkpoint = {**checkpoint, "state_dict": checkpoint[_EXACT]}
        super().load_model_state_dict(checkpoint, strict)


def capture(module: LightningModule, forward_backward: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`msamp.capture` for a module with `automatic_optimization = False`. Call what it returns in `training_step`, and log its result:

        def training_step(self, batch):
            self.step = self.step or capture(self, self.forward_backward)
            self.log("loss", self.step(batch))

    Lightning's automatic optimization logs and reads batches inside the step, which a graph would not repeat.

    Args:
        module: its `configure_optimizers` returns the optimizer of `msamp.initialize`.
        forward_backward, settings: of `msamp.capture`.

    Raises:
        ValueError: if the module has automatic optimization.
    """
    if module.automatic_optimization:
        raise ValueError("capture requires automatic_optimization = False in the module's __init__")
    optimizer: Any = module.optimizers()
    step = capture_step(module, optimizer.optimizer, forward_backward, **settings)

    def run(*args: Any, **kwargs: Any) -> Any:
        counting: Any = module.optimizers()
        counting._on_before_step()  # as LightningOptimizer.step does, so that the Trainer counts the step
        result = step(*args, **kwargs)
        counting._on_after_step()
        return result

    return run
