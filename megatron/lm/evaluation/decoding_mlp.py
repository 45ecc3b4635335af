"""The MLP of a transformer layer in inference: dense, or a mixture of experts.

A token's result does not depend on the other tokens of the batch. A dense FP8 layer casts each row by itself (`msamp.nn.inference`).
Experts in FP8 would have one scale for all rows, so their weights are used in the compute dtype instead, dequantized once for all steps:
2 bytes per parameter of the experts in addition to the stored weights.
"""

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.nn import functional

from megatron.lm.model.linear import FP8Gemm
from megatron.lm.model.moe.layer import MoE
from msamp.nn.expert_layer import plain_experts
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.inference import InferenceGemm
from msamp.numerics.tensor import ScalingTensor


class InferenceLinear:
    """A linear layer of the model including its bias: in FP8 with a scale per row, or else by calling the module.

    Attributes:
        gemm: the FP8 GEMM; None to call the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, weight = module, module.weight
        fp8 = isinstance(module, FP8Gemm) and isinstance(weight, ScalingTensor)
        self.gemm = InferenceGemm(weight, module.scaling.gemm) if fp8 else None  # type: ignore[arg-type, union-attr]

    def renew(self) -> None:
        """Update to the current weight."""
        if self.gemm is not None:
            self.gemm.renew(self._module.weight)  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """Return the weight operand of the FP8 GEMM; empty without one."""
        return [] if self.gemm is None else [self.gemm.weight.codes, self.gemm.weight.scale_inv]

    def __call__(self, x: Tensor) -> Tensor:
        if self.gemm is not None:
            return self.gemm(x, self._module.bias)  # type: ignore[arg-type]
        y, left = self._module(x)
        return y if left is None else y + left


class DenseMLP:
    """A dense MLP, for x [.., h].

    Args:
        mlp: its linear layers.
        activation: `activation_of` its layer.
    """

    def __init__(self, mlp: MLP, activation: str) -> None:
        self._linears = self._fc1, self._fc2 = InferenceLinear(mlp.linear_fc1), InferenceLinear(mlp.linear_fc2)
        self._activation = activation

    def renew(self) -> None:
        """Update to the current weights."""
        for linear in self._linears:
            linear.renew()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of a step that are not the model's."""
        return [x for linear in self._linears for x in linear.tensors()]

    def __call__(self, x: Tensor) -> Tensor:
        y = self._fc1(x)
        if self._activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        elif self._activation == "squared-relu":
            y = functional.relu(y).square()
        else:
            y = functional.gelu(y, approximate="tanh")
        return self._fc2(y)


class MixtureMLP:
    """A mixture of experts with its shared expert, for x [b, s, h] in the compute dtype."""

    def __init__(self, layer: MoE, activation: str) -> None:
        self._router, self._experts = layer.router, layer.experts
        self._shared = None if layer.shared_experts is None else DenseMLP(layer.shared_experts, activation)
        self._dtype = layer.config.params_dtype
        self._copies: dict[str, Tensor] = {}
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Update to the current weights. Copies keep their address, so that a CUDA graph reads the new values."""
        for name in self._experts.weight_names:
            weight = getattr(self._experts, name)
            if not isinstance(weight, ExpertMatrices):
                continue
            copy = self._copies.get(name)
            if copy is None or copy.device != weight.matrices[0].device:
                self._copies[name] = copy = torch.empty(weight.shape, dtype=self._dtype, device=weight.matrices[0].device)
            for own, matrix in zip(copy, weight.matrices, strict=True):
                own.copy_(matrix.dequantize(torch.float32) if isinstance(matrix, ScalingTensor) else matrix)
        if self._shared is not None:
            self._shared.renew()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of a step that are not the model's."""
        return [*self._copies.values(), *([] if self._shared is None else self._shared.tensors())]

    def __call__(self, x: Tensor) -> Tensor:
        probs, experts = self._router(x)
        fc1, fc2 = (self._copies[name] if name in self._copies else getattr(self._experts, name) for name in self._experts.weight_names)
        y = plain_experts(x.flatten(0, 1), probs, experts, fc1, fc2).view_as(x)
        return y if self._shared is None else y + self._shared(x)


def inference_mlp(mlp: MLP | MoE, activation: str) -> DenseMLP | MixtureMLP:
    """Return the MLP of a layer for inference; `activation`: `activation_of` the layer."""
    return MixtureMLP(mlp, activation) if isinstance(mlp, MoE) else DenseMLP(mlp, activation)
