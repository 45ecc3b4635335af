"""The linear layers in the model's ModuleSpec slots: megatron-core's column- and row-parallel layers around our GEMMs."""

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import functional

from msamp.kernels.scaled_mm import native_bf16
from msamp.nn.linear import describe_gemm, scaling_parameter
from msamp.nn.linear_fn import linear
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.formats import of_dtype
from msamp.numerics.recipe import BF16, Recipe


class FP8Gemm(nn.Module):
    """Mixed into a megatron-core linear layer: its weight in the recipe's format, its three GEMMs in FP8.

    Attributes:
        recipe: set by the subclass.
        scaling: scales of input, grad_output and weight.
    """

    recipe: Recipe
    weight: nn.Parameter
    _initial_weight: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.recipe.gemm is not None
        size = self.config.tensor_model_parallel_size  # type: ignore[union-attr]
        if size != 1:
            raise ValueError(
                f"FP8 linear layers run with --tensor-model-parallel-size 1 in this version, not {size}; or use --opt-level O0"
            )
        drawn = self.weight
        self.weight = scaling_parameter(drawn.detach(), self.recipe)
        self.weight.__dict__.update(drawn.__dict__)  # megatron-core's marks: how the weight is split
        self.scaling = LinearScaling(self.recipe.gemm, device=drawn.device)
        own_master = self.recipe.weight == self.recipe.states.master
        self._initial_weight = None if own_master else drawn.detach()

    def take_initial_weight(self) -> Tensor | None:
        """The weight as drawn, for a master that must not start from its FP8 rounding; handed out once, then forgotten."""
        values, self._initial_weight = self._initial_weight, None
        return values

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        return linear(input, weight, bias, self.scaling)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        precision = describe_gemm(self.scaling.gemm, self.weight)
        return super().__repr__().removesuffix(")") + f", {precision}, scaling {self.scaling.gemm.input.scaling})"


class WideGemm(nn.Module):
    """Mixed into a megatron-core linear layer: a CPU that only emulates BF16 multiplies the BF16 values in FP32.

    The sum is rounded to BF16 once, as tensor cores do it; emulated BF16 products are tens of times slower.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        split = kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]
        if split or input.dtype != torch.bfloat16 or native_bf16(input.device):
            return super()._forward_impl(input, weight, bias, **kwargs)  # type: ignore[misc]
        return functional.linear(input.float(), weight.float(), None if bias is None else bias.float()).to(input.dtype)

    def __repr__(self) -> str:
        precision = of_dtype(self.config.params_dtype)  # type: ignore[union-attr,arg-type]
        return super().__repr__().removesuffix(")") + f", weight and GEMM {precision})"


@functools.cache
def _bind(base: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    """`base` with the GEMMs of `recipe`."""
    if recipe.fp8:
        return type(f"FP8{base.__name__}", (FP8Gemm, base), {"recipe": recipe})
    return type(base.__name__, (WideGemm, base), {})


def column_linear(recipe: Recipe) -> type[nn.Module]:
    """Class for the slots `linear_qkv` and `linear_fc1`, constructed as megatron-core's ColumnParallelLinear."""
    return _bind(ColumnParallelLinear, recipe)


def row_linear(recipe: Recipe) -> type[nn.Module]:
    """Class for the slots `linear_proj` and `linear_fc2`, constructed as megatron-core's RowParallelLinear."""
    return _bind(RowParallelLinear, recipe)


def output_linear(recipe: Recipe) -> type[nn.Module]:
    """Class of the LM head, which stays in the compute dtype at every level."""
    return _bind(ColumnParallelLinear, BF16)
