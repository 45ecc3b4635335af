"""FP8Linear: a drop-in for torch.nn.Linear."""

import math

import torch
from torch import nn

from msamp.nn.linear_fn import linear
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O2, Gemms, Recipe
from msamp.numerics.tensor import ScalingTensor


def check_finite(values: torch.Tensor, name: str) -> None:
    """ValueError naming the weight where a value is NaN or infinite."""
    bad = int((~torch.isfinite(values.detach())).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} values that are NaN or infinite; a weight must be finite: check the checkpoint it came from")


def scaling_parameter(values: torch.Tensor, recipe: Recipe, requires_grad: bool = True, name: str = "weight") -> nn.Parameter:
    """A Parameter that holds `values` (any float dtype) in the recipe's weight format and looks like their dtype.

    Raises:
        ValueError: where a value is NaN or infinite.
    """
    check_finite(values, name)
    return nn.Parameter(ScalingTensor.quantize(values.contiguous(), recipe.weight), requires_grad)


def describe_gemm(gemm: Gemms, weight: torch.Tensor) -> str:
    """One line for `print(model)`: what is stored and what the GEMMs run in."""
    stored = weight.format if isinstance(weight, ScalingTensor) else weight.dtype
    blocks = "" if gemm.tensorwise else f", {' x '.join(str(cast.granularity) for cast in (gemm.input, gemm.weight))}"
    return f"weight {stored}, GEMM {gemm.input.format} x {gemm.weight.format}, grad_output {gemm.grad_output.format}{blocks}"


class FP8Linear(nn.Module):
    """y = x W^T + b, all three GEMMs in FP8 (see `msamp.nn.linear_fn`).

    Args:
        in_features, out_features: at least 1; the GEMMs pad to multiples of 16.
        bias: learn an additive bias of `dtype`.
        recipe: one with FP8 GEMMs (O1, O2, O3); its `weight` format is how `weight` is stored.
        device, dtype: of the layer; `dtype` is what the weight looks like and its gradient's dtype.

    Shape: [..., in_features] -> [..., out_features] in the input's dtype.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe = O2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or torch.nn.Linear")
        self.in_features, self.out_features = in_features, out_features
        values = torch.empty(out_features, in_features, device=device, dtype=dtype)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        self.weight = scaling_parameter(values, recipe)
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound)) if bias else None
        self.scaling = LinearScaling(recipe.gemm, device=values.device)

    @classmethod
    def from_linear(cls, source: nn.Linear, recipe: Recipe = O2, name: str = "weight") -> "FP8Linear":
        """The FP8 layer with the weights of `source`; its bias Parameter is taken over as it is."""
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or keep torch.nn.Linear")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = source.in_features, source.out_features
        layer.weight = scaling_parameter(source.weight.detach(), recipe, source.weight.requires_grad, name)
        vars(layer.weight).update(vars(source.weight))  # such as _no_weight_decay, by which optimizers and others know a weight
        layer.bias = source.bias
        layer.scaling = LinearScaling(recipe.gemm, device=source.weight.device)
        layer.train(source.training)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input has {x.shape[-1]} features in its last dimension, this layer takes {self.in_features}")
        return linear(x, self.weight, self.bias, self.scaling)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        precision = describe_gemm(self.scaling.gemm, self.weight)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {precision}"
