"""Names of Microsoft's MS-AMP, for code that was written for it: `from msamp.compat import LBAdamW`. `import msamp` does not load them.

Each name does what it does in MS-AMP, using this library, or raises an error with the replacement. docs/guide/moving.md has the table and
the numerical differences.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from msamp.integrations import clipping
from msamp.nn.convert import convert
from msamp.numerics import recipe
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.recipe import StateFormats
from msamp.optim.optimizer import LowPrecisionOptimizer

opt_levels = ["O1", "O2", "O3"]

# MS-AMP's names of formats ("qtypes"); here they are `msamp.formats`.
Dtypes = SimpleNamespace(kfloat8_e4m3=E4M3, kfloat8_e5m2=E5M2, kfloat16=FP16, kbfloat16=BF16, kfloat32=FP32)
_MOMENTS: dict[torch.dtype, Format] = {torch.uint8: E4M3, torch.float16: FP16, torch.float32: FP32}


class LBAdamW(LowPrecisionOptimizer):
    """MS-AMP's AdamW: moments in `exp_avg_dtype` and `exp_avg_sq_dtype`, torch.uint8 (E4M3), torch.float16 (scaled) or torch.float32.

    Raises:
        ValueError: for `bias_correction=False`, `amsgrad`, `maximize`, `tensor_scale=False`, or another dtype.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        needed = {"bias_correction": (bias_correction, True), "tensor_scale": (tensor_scale, True)}
        needed |= {"amsgrad": (amsgrad, False), "maximize": (maximize, False)}
        for name, (value, legal) in needed.items():
            if value != legal:
                raise ValueError(f"{name} is {value}; it must be {legal}: leave it out, or use torch.optim.AdamW without msamp")
        for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if dtype not in _MOMENTS:
                raise ValueError(f"{name} is {dtype}; choose one of {', '.join(map(str, _MOMENTS))}")
        formats = StateFormats(FP16, E4M3, _MOMENTS[exp_avg_dtype], _MOMENTS[exp_avg_sq_dtype])
        super().__init__(params, lr, betas, eps, weight_decay, formats=formats, decoupled=self._decoupled)


class LBAdam(LBAdamW):
    """MS-AMP's Adam: like `LBAdamW`, with the decay added to the gradient."""

    _decoupled = False


class LinearReplacer:
    """Replaces linear layers by FP8 layers, as `msamp.convert` does; `msamp.initialize` also converts the optimizer."""

    @classmethod
    def replace(cls, model: nn.Module, weight_qtype: Format = FP16, src_rank: int = 0, group: Any = None) -> nn.Module:
        """Convert the model's linear layers to FP8 in place, with weights in `weight_qtype`, and return the model.

        Raises:
            ValueError: if `weight_qtype` is not FP16 or E4M3, or ranks are given: `msamp.initialize` makes their weights equal.
        """
        if src_rank != 0 or group is not None:
            raise ValueError("LinearReplacer.replace does not broadcast weights; use msamp.initialize(model, optimizer, group=group)")
        by_qtype = {FP16: recipe.O2, E4M3: recipe.O3}.get(weight_qtype)
        if by_qtype is None:
            raise ValueError(f"weight_qtype is {weight_qtype}; choose Dtypes.kfloat16 or Dtypes.kfloat8_e4m3")
        return convert(model, by_qtype)


class ScalingMeta:
    """MS-AMP's scale, amax and window of a tensor: not supported, since scales and amax histories are separate here."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "ScalingMeta is not supported: msamp.ScalingTensor.quantize(x, msamp.formats.E4M3) returns a tensor with its scale "
            "(x.scale_inv), and amax histories belong to a layer's casts (msamp.scaling.Delayed)"
        )


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Call `msamp.clip_grad_norm_`; return the 2-norm before clipping, FP64 0-dim.

    Raises:
        ValueError: if `norm_type` is not 2.
        RuntimeError: with `error_if_nonfinite`, if gradients are not finite; they are already scaled then.
    """
    norm = clipping.clip_grad_norm_(parameters, max_norm, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the gradient norm is {float(norm)}; without error_if_nonfinite, the optimizer skips such a step")
    return norm
