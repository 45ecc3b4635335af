"""The experts of the trainer in FP8: one low-precision parameter per expert, and the values from which their masters start."""

from collections.abc import Collection

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron.lm.model.moe.layer import MoE
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import Recipe


class TrainedMatrices(ExpertMatrices):
    """`ExpertMatrices` that keep their initial weights for the optimizer's masters.

    Args:
        weight: [E, N, K] in the compute dtype.
        recipe: of the run.
        first: number of the first expert.
    """

    def __init__(self, weight: nn.Parameter, recipe: Recipe, first: int = 0) -> None:
        assert recipe.gemm is not None
        super().__init__(weight, recipe, LinearScaling(recipe.gemm, device=weight.device), first=first)
        own_master = recipe.weight == recipe.states.master
        self._initial_weight: Tensor | None = None if own_master else weight.detach()

    def take_initial_weights(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each parameter and its values before FP8 rounding, and release them; nothing from the second call on."""
        values, self._initial_weight = self._initial_weight, None
        return [] if values is None else list(zip(self.matrices, values.unbind(), strict=True))


def convert_experts(model: nn.Module, recipe: Recipe, layers: Collection[int]) -> None:
    """Store and compute experts of a model in FP8, one layer after another.

    With `--recompute-modules mlp` they compute FC1's output again, as fused layers do, instead of the whole MLP with its exchange between
    ranks; a layer with a shared expert, whose activations would then be kept, recomputes its whole MLP.

    Args:
        model: with its initial weights, in the compute dtype.
        recipe: of the run.
        layers: of the whole model, from 0, whose experts are converted (`PrecisionConfig.fp8_experts`).
    """
    for block in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        layer = block.mlp
        if not isinstance(layer, MoE):
            continue
        assert layer.router.layer_number is not None
        if layer.router.layer_number - 1 not in layers:
            continue
        for name in layer.experts.weight_names:
            weight = layer.experts.get_parameter(name)
            delattr(layer.experts, name)
            layer.experts.add_module(name, TrainedMatrices(weight, recipe, layer.experts.first))
        if block.recompute_mlp and layer.shared_experts is None:
            block.recompute_mlp, layer.experts.recompute_fc1 = False, True
