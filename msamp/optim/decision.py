"""What a step's gradients decide before the update: amaxes, norm, what multiplies them, and whether the step can be taken."""

from dataclasses import dataclass
from typing import Protocol

import torch


class LossScale(Protocol):
    """What multiplied the loss, and with it every gradient (`msamp.fp16.scaler.LossScaler` is one)."""

    def scale(self, device: torch.device) -> torch.Tensor:
        """FP32 0-dim on `device`; where a CUDA graph holds the step, always in the same memory."""

    def update(self, overflow: torch.Tensor) -> None:
        """Look at a step: bool 0-dim on the device, whether its gradients were not finite."""


@dataclass(frozen=True)
class Decision:
    """What the gradients of a step have decided.

    Attributes:
        amaxes: FP32 [rows, parameters]: amax of the gradient, those of the states that the updates keep and of the master, as stored, 0
            where no scale will be taken from it (`msamp.optim.updates`), and last the gradient's scale_inv, 0 for a plain one; of whole
            parameters.
        norm: FP64 0-dim, of all gradients.
        coefficient: FP32 0-dim, what multiplies them; None: nothing does.
        usable: bool 0-dim, whether the step can be taken.
    """

    amaxes: torch.Tensor
    norm: torch.Tensor
    coefficient: torch.Tensor | None
    usable: torch.Tensor
