"""What tests of FSDP2 and of fused blocks share: a net, the filter that converts every linear layer, and what a call refuses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msamp.nn.saved_activations import AS_IT_IS, Saved
from msamp.nn.transformer_block import TransformerBlock


def everything(name: str, layer: nn.Linear) -> bool:
    return True


def message(call: Callable[[], Any]) -> str:
    """The message of the ValueError that a call raises, for ranks to return."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


class FusedNet(nn.Module):
    """Two blocks of width 64 that run as fused functions once they are converted.

    Args:
        saved: how they keep the inputs of norms and activations.
    """

    def __init__(self, saved: Saved = AS_IT_IS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([TransformerBlock(64, 4, 48, bias=True, saved=saved) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert block.fused
            x = block(x)
        return x
