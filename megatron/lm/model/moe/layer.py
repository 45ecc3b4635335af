"""The mixture-of-experts layer, in the place of a transformer layer's MLP: router, experts, and an optional shared expert.

    y = sum over a token's experts e of p_e MLP_e(x)  +  MLP_shared(x)

Without expert parallelism every rank has all experts, and no token is sent. Under tensor parallelism attention is split and experts are
not: with sequence parallelism a rank computes its own part of the sequence, and `Grid.sums` adds the gradients of the experts like the
gradients of the norms. With expert parallelism the ranks of `Grid.experts` have different experts and send each other their tokens
(`msamp.parallel.expert_parallel`). Their weights have other replicas than the rest of the model (`grid.is_expert`).
"""

import copy
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron.lm.model.moe.router import Router
from megatron.lm.processes.grid import Grid
from megatron.lm.processes.process_groups import device
from msamp.nn.expert_layer import Experts
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.expert_parallel import ExpertParallel


class MoE(MegatronModule):
    """A mixture of experts, constructed and called as megatron-core's MLP: `forward(x [s, b, h])` returns (y [s, b, h], None).

    Subclasses define `shared`, the linear layers and activation of the shared expert (`moe_class`).

    Attributes:
        router, experts: the layer's parts.
        shared_experts: the shared expert, a dense MLP; None without `--moe-shared-expert-intermediate-size`.
    """

    shared: MLPSubmodules

    def __init__(self, config: TransformerConfig, **_of_the_layer: Any) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None
        assert config.moe_ffn_hidden_size is not None
        groups = get_default_pg_collection()
        self.router = Router(config, groups)
        spread = config.expert_model_parallel_size > 1
        self.experts = Experts(
            config.num_moe_experts // config.expert_model_parallel_size,
            config.hidden_size,
            config.moe_ffn_hidden_size,
            device=device(),
            dtype=config.params_dtype,
            ranks=ExpertParallel(groups.ep) if spread else None,
        )
        for weight in self.experts.parameters():
            weight.allreduce = not spread  # type: ignore[attr-defined]
            # Ranks that share experts compute the tokens of all parts of a sequence.
            weight.sequence_parallel = config.sequence_parallel and not spread  # type: ignore[attr-defined]
        size = config.moe_shared_expert_intermediate_size
        self.shared_experts: MLP | None = None
        if size is not None:
            own = copy.copy(config)  # MLP reads a part of its width from the configuration
            own.ffn_hidden_size = size
            self.shared_experts = MLP(own, self.shared, ffn_hidden_size=size, tp_group=groups.tp)

    def set_layer_number(self, layer_number: int) -> None:
        """Called by megatron-core's TransformerLayer."""
        self.router.set_layer_number(layer_number)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """As megatron-core's, with this rank's experts among all experts of the layer: FP8 ones by the numbers in their names."""
        entries: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.experts.ranks is None:
            return entries
        ranks, copies = self.experts.ranks, Grid.current().expert_copies.rank
        for name, weight in self.experts.named_parameters(prefix=f"{prefix}experts"):
            split = [] if isinstance(weight, ScalingTensor) else [(0, ranks.rank, ranks.ranks)]
            entries[name] = ShardedTensor.from_rank_offsets(name, weight, *split, replica_id=(0, 0, copies))
        return entries

    def forward(self, hidden_states: Tensor, **ignored: Any) -> tuple[Tensor, None]:
        """hidden_states [s, b, h] -> ([s, b, h], None); megatron-core passes a padding mask, which is None in a GPT."""
        if any(value is not None for value in ignored.values()):
            raise ValueError(f"a mixture of experts does not support {', '.join(ignored)}: call it with hidden states only")
        probs, experts = self.router(hidden_states)
        y = self.experts(hidden_states.flatten(0, 1), probs, experts).view_as(hidden_states)
        if self.shared_experts is None:
            return y, None
        return y + self.shared_experts(hidden_states)[0], None


def moe_class(shared: MLPSubmodules) -> type[MoE]:
    """Return the class of a mixture of experts whose shared expert has these linear layers and activation."""
    return type("MoE", (MoE,), {"shared": shared, "__doc__": MoE.__doc__})


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
