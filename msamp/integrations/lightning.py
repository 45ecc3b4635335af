"""Lightning, on any number of processes, with one argument of its Trainer.

    from msamp.integrations.lightning import Strategy

    class Module(lightning.LightningModule):
        def configure_optimizers(self):
            _, optimizer = msamp.initialize(self, torch.optim.AdamW(self.parameters(), lr=1e-3), "O2")
            return optimizer

    lightning.Trainer(strategy=Strategy()).fit(Module(), rows)

Lightning's own DDPStrategy wraps the module in DistributedDataParallel, which cannot hold FP8 weights, and every strategy of its own loads
a checkpoint before `configure_optimizers`, into a model without scales. This one does neither. Its checkpoints hold plain weights in
`state_dict`, so that `load_from_checkpoint` and any other strategy read them, and the exact ones beside them, from which it resumes bit for
bit.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.saving import exact_state_dict, plain_state_dict
from msamp.nn.linear import transposed_weights
from msamp.nn.scaling_state import LinearScaling

_EXACT = "msamp_state_dict"


class Strategy(DDPStrategy):
    """Lightning's DDPStrategy for a module with a `configure_optimizers` that returns the optimizer of `msamp.initialize`.

    `gradient_clip_val` clips the average over the processes; under ZeRO (O3) give `msamp.initialize(..., clip_grad=1.0)` instead.

    Args:
        settings: DDPStrategy's own, but for those of DistributedDataParallel.

    Raises:
        ValueError: at `fit`, for an optimizer that is not one of `msamp.initialize`, several, or one without some parameter of the module
            that wants a gradient; for FP16 with loss scaling; for a callback that would average weights with others.
    """

    _accumulates = False  # this backward is not the last of its step

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the layers are FP8 by then."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """As DDPStrategy's, without DistributedDataParallel."""
        if str(trainer.precision).startswith("16"):
            raise ValueError(
                f"precision is {trainer.precision!r}, and FP16 with loss scaling is for msamp.amp; take '32-true', 'bf16-mixed' or "
                "'bf16-true'"
            )
        super().setup(trainer)
        if self.optimizers:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                self._check_average(callback)

    def configure_ddp(self) -> None:
        """Nothing: the optimizer averages the gradients."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As Lightning's."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        found = [type(each).__name__ for each in self.optimizers if not isinstance(each, LoopOptimizer)]
        if found or len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {', '.join(found) or len(self.optimizers)}; msamp's strategy takes one optimizer, which "
                "msamp.initialize returns"
            )
        # No GradScaler calls here (`setup` refuses FP16), and Lightning does not clip the gradients of an optimizer that one may call.
        self.optimizers[0]._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        held = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
        for name, p in self.lightning_module.named_parameters():
            if p.requires_grad and id(p) not in held:
                raise ValueError(
                    f"{name} wants a gradient and is not in the optimizer, so that nothing would average it over the processes; give "
                    "msamp.initialize the whole module and all its parameters, or set requires_grad to False"
                )

    def _check_average(self, callback: Callback) -> None:
        assert self.lightning_module is not None
        if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            return
        kind, way = type(callback).__name__, "average a msamp.float_copy(model) with torch.optim.swa_utils.AveragedModel instead"
        transposed = next(iter(transposed_weights(self.lightning_module)), None)
        if transposed is not None:
            raise ValueError(f"{kind} would average {transposed} with its transpose, as which it lay before msamp.initialize; {way}")
        scales = {id(x) for m in self.lightning_module.modules() if isinstance(m, LinearScaling) for x in m.buffers()}
        other = next((name for name, x in self.lightning_module.named_buffers() if id(x) not in scales), None)
        if isinstance(callback, WeightAveraging) and other is not None:
            raise ValueError(
                f"{kind} pairs buffers by their order, and would mix {other} with scales of FP8 layers; take StochasticWeightAveraging, "
                f"which leaves buffers alone, or {way}"
            )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For all micro-batches of a step but the last."""
        self._accumulates = True
        with contextlib.ExitStack() as stack:
            for each in self.optimizers:
                stack.enter_context(each.no_sync())  # type: ignore[attr-defined]
            try:
                yield
            finally:
                self._accumulates = False

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """As Lightning's; gradients that are to be clipped are brought into `p.grad`, where it clips."""
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.gradient_clip_val and not self._accumulates:
            for each in self.optimizers:
                each.synchronize()  # type: ignore[attr-defined]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Plain weights, from the masters. Collective under ZeRO."""
        assert self.lightning_module is not None
        if not self.optimizers:
            return super().lightning_module_state_dict()
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, LoopOptimizer)
        return plain_state_dict(self.lightning_module, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's, with the exact weights where training can go on from it."""
        assert self.lightning_module is not None
        if self.optimizers and "optimizer_states" in checkpoint:
            checkpoint = {**checkpoint, _EXACT: exact_state_dict(self.lightning_module)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As Lightning's, of the exact weights where the checkpoint and this model have them."""
        if self.optimizers and _EXACT in checkpoint:
            checkpoint = {**checkpoint, "state_dict": checkpoint[_EXACT]}
        super().load_model_state_dict(checkpoint, strict)
