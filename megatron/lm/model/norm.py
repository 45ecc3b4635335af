"""LayerNorm and RMSNorm for megatron-core's norm slots, with sequence parallelism and without Apex or Transformer Engine."""

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.lm.processes.process_groups import device
from msamp.nn import unfused
from msamp.nn.saved_activations import AS_IT_IS, Saved


class _CoreNorm:
    """Mixin that gives a norm of `msamp.nn` megatron-core's constructor.

    Weight and bias are [hidden_size] in the parameters' dtype; the statistics are computed in FP32 whatever the input's dtype. They have
    the attribute `sequence_parallel` if each tensor-parallel rank sees a part of what they normalize, a slice of the sequence or some of
    the heads: then their gradients must be summed over the tensor-parallel group (`megatron.lm.training.gradients`).

    Args:
        config, hidden_size, eps: as megatron-core constructs norms.
        saved: how the input is kept for backward.
        heads: for queries or keys, whose `hidden_size` is the width of one head: 1 normalizes each head, a larger number the heads of a
            token together, [s, b, .., head size] -> the same shape (OLMoE). None elsewhere.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, saved: Saved = AS_IT_IS, heads: int | None = None
    ) -> None:
        made: Any = {"eps": eps, "saved": saved, "device": device(), "dtype": config.params_dtype}
        super().__init__(hidden_size * (heads or 1), **made)  # type: ignore[call-arg]
        self.together = heads is not None and heads > 1
        split = config.tensor_model_parallel_size > 1 if heads == 1 else config.sequence_parallel
        for parameter in self.parameters():  # type: ignore[attr-defined]
            parameter.sequence_parallel = split

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension, or with several `heads` the last two."""
        y: Tensor = super().forward(input.flatten(2) if self.together else input)  # type: ignore[misc]
        return y.view_as(input) if self.together else y


class LayerNorm(_CoreNorm, unfused.LayerNorm):
    """Layer normalization, constructed as megatron-core's."""


class RMSNorm(_CoreNorm, unfused.RMSNorm):
    """Root-mean-square normalization, without mean and bias, constructed as megatron-core's."""


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """Return the norm class of that name; raise a ValueError if the name is unknown."""
    classes: dict[str, type[torch.nn.Module]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization not in classes:
        raise ValueError(f"--normalization {normalization}: choose one of {', '.join(classes)}")
    return classes[normalization]


def head_norm(normalization: str, heads: int) -> ModuleSpec:
    """Return the spec of a norm of queries or keys; `heads` as in `LayerNorm`. Raise a ValueError if the name is unknown."""
    return ModuleSpec(module=norm_class(normalization), params={"heads": heads})
