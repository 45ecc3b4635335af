"""LayerNorm and RMSNorm for megatron-core's norm slots, with sequence parallelism and without Apex or Transformer Engine."""

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.lm.processes.process_groups import device
from msamp.nn import unfused
from msamp.nn.saved_activations import AS_IT_IS, Saved


class LayerNorm(unfused.LayerNorm):
    """Layer normalization over the last dimension.

    Weight and bias are [hidden_size] in the parameters' dtype; mean and variance are computed in FP32 whatever the input's dtype. `saved`
    defines how the input is kept for backward. Weight and bias have the attribute `sequence_parallel`: with sequence parallelism each rank
    sees a slice of the sequence, so their gradients must be summed over the tensor-parallel group (`megatron.lm.training.gradients`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, saved: Saved = AS_IT_IS) -> None:
        super().__init__(hidden_size, saved, eps=eps, device=device(), dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


class RMSNorm(unfused.RMSNorm):
    """Root-mean-square normalization over the last dimension: no mean, no bias; otherwise as `LayerNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, saved: Saved = AS_IT_IS) -> None:
        super().__init__(hidden_size, eps, saved, device=device(), dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


class HeadLayerNorm(LayerNorm):
    """`LayerNorm` of the queries or keys of one head, [..., head size]: see `_mark_head_norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        _mark_head_norm(self, config)


class HeadRMSNorm(RMSNorm):
    """`RMSNorm` of the queries or keys of one head, [..., head size]: see `_mark_head_norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        _mark_head_norm(self, config)


class ProjectionLayerNorm(LayerNorm):
    """`LayerNorm` of the queries or keys of all heads of a token together: [s, b, .., head size] -> the same shape.

    Args:
        config, hidden_size, eps: as megatron-core constructs norms of queries and keys; `hidden_size` is the width of one head.
        heads: normalized together.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int) -> None:
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(2)).view_as(input)


class ProjectionRMSNorm(RMSNorm):
    """`RMSNorm` of the queries or keys of all heads of a token together (OLMoE); arguments as `ProjectionLayerNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int) -> None:
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(2)).view_as(input)


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """Return the norm class of that name; raise a ValueError if the name is unknown."""
    classes = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization not in classes:
        raise ValueError(f"--normalization {normalization}: choose one of {', '.join(classes)}")
    return classes[normalization]


def head_norm_class(normalization: str) -> type[torch.nn.Module]:
    """Return the norm class of that name for queries and keys; raise a ValueError if the name is unknown."""
    return {LayerNorm: HeadLayerNorm, RMSNorm: HeadRMSNorm}[norm_class(normalization)]


def projection_norm(normalization: str, heads: int) -> ModuleSpec:
    """Return the spec of a norm over all `heads`; raise a ValueError if the name is unknown."""
    module = {LayerNorm: ProjectionLayerNorm, RMSNorm: ProjectionRMSNorm}[norm_class(normalization)]
    return ModuleSpec(module=module, params={"heads": heads})


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _mark_head_norm(norm: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the weight as `sequence_parallel`, so that its gradient is summed over tensor-parallel ranks: all heads share one weight, and
    each rank has some of the heads."""
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]
