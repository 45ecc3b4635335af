"""FP8Linear: a drop-in replacement for torch.nn.Linear whose three GEMMs run in FP8 (FP8-LM section 2).

The layer computes y = x W^T + b with x [..., K], W [N, K], b [N] and y [..., N] in the dtype of x. With q(t) = round(s_t t) in FP8, g the
gradient of y, and M tokens:

    y  = (q(x) q(W)^T) / (s_x s_W) + b     [M, N]     sums over K     fast accumulation
    dx = (q(g) q(W)) / (s_g s_W)           [M, K]     sums over N     full accumulation
    dW = (q(g)^T q(x)) / (s_g s_x)         [N, K]     sums over M     full accumulation

By default each tensor has one scale, a power of two:

    tensor   stored between steps    operand    scale                               saved for backward
    x        -                       E4M3       delayed, from the amax history      q(x)^T, 1 byte per element
    W        O1, O2: FP16, scaled    E4M3       from its amax, once per step        the stored payload, cast again in backward
    W        O3: E4M3                as stored  set by the optimizer                the stored payload
    g        -                       E5M2       delayed, from the amax history      -
    dW       -                       -          -                                   -

x and W need E4M3's precision, and g needs E5M2's range. dW has the outer dtype of W, and gradient synchronization casts it to E4M3.
Full accumulation makes the two gradient GEMMs slightly slower; `Gemms.with_fast` turns it off.

Why a layer, and not a cast around torch's layer? Because three things must survive from step to step: the low-precision weight, which the
optimizer updates in place, with no high-precision copy next to it; the amax histories (`LinearScaling`), which make a delayed scale known
before its tensor is read, so that one pass casts, transposes and measures the next amax; and the FP8 scale of a 16-bit weight, which all
micro-batches of a step share. `ScalingState` rolls the histories of all layers once per step. Until a history is full (16 steps by
default), the scale comes from the tensor itself. That just-in-time scale reads the tensor twice, which is why delayed scaling is the
default.

`FP8Linear` subclasses torch.nn.Linear because adapter libraries look for that class. `weight` is a Parameter that holds a ScalingTensor and
presents itself as BF16 or FP32. Loading plain values casts them again and resets the layer's histories.

If an operand holds NaN or Inf, the results of its GEMMs are NaN and the optimizer skips the step. The GEMMs pad dimensions with zeros to
the multiples of 16 that the hardware requires, which changes no sum.

Next: `linear_fn` is the autograd function, `gemm` the three GEMMs, and `scaling_state` the amax histories.
"""

import math
from typing import Any

import torch
from torch import nn

from msamp.nn.linear_fn import linear
from msamp.nn.parameter_swap import apply_
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.lost_writes import loading
from msamp.numerics.recipe import O2, Gemms, Recipe, by_name
from msamp.numerics.stochastic_rounding import off_ties, unwrapped
from msamp.numerics.tensor import ScalingTensor, not_exportable
from msamp.numerics.tensor_ops import watch


def check_plain(values: torch.Tensor, name: str) -> None:
    """Raise a ValueError that names the weight if another library quantized it: its tensor is a subclass with its own `dequantize`."""
    if not isinstance(values, ScalingTensor) and type(values).dequantize is not torch.Tensor.dequantize:
        raise ValueError(
            f"{name} is a {type(values).__module__}.{type(values).__name__}, which another library quantized; pass the model in its "
            "floating-point form, as in nn.Parameter(weight.dequantize())"
        )


def check_finite(values: torch.Tensor, name: str) -> None:
    """Raise a ValueError that names the weight if any value is NaN or infinite, or as `check_plain`."""
    check_plain(values, name)
    bad = 0 if values.is_meta else int((~torch.isfinite(values.detach())).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} values that are NaN or infinite; a weight must be finite: check the checkpoint it came from")


def scaling_parameter(values: torch.Tensor, recipe: Recipe, requires_grad: bool = True, name: str = "") -> nn.Parameter:
    """Return a Parameter that stores `values` (any float dtype) in the recipe's weight format and presents itself in their dtype.

    Raises:
        ValueError: if a value is NaN or infinite.
    """
    check_finite(values, name or "weight")
    moved = values
    if name and requires_grad and recipe.gemm is not None and recipe.weight == recipe.states.master and not values.is_meta:
        moved = off_ties(values, recipe.gemm.weight, recipe.weight)
    stored = ScalingTensor.quantize(moved.contiguous(), recipe.weight, dtype=values.dtype)
    if name:
        stored.label = unwrapped(name)
    return nn.Parameter(stored, requires_grad)


def describe_gemm(gemm: Gemms, weight: torch.Tensor) -> str:
    """Return one line for `print(model)`: the formats of the stored weight and of the GEMMs' operands."""
    if not isinstance(weight, ScalingTensor):  # in a float copy, or computed by pruning or torch's parametrizations
        return f"weight {weight.dtype}, multiplied in that dtype and not in FP8"
    stored = weight.format
    blocks = "" if gemm.tensorwise else f", {' x '.join(str(cast.granularity) for cast in (gemm.input, gemm.weight))}"
    return f"weight {stored}, GEMM {gemm.input.format} x {gemm.weight.format}, grad_output {gemm.grad_output.format}{blocks}"


class Loading(nn.Module):
    """A module that can load its low-precision weights from a ScalingTensor (exactly), from plain values of any float dtype, or from a
    payload with `<name>_scale_inv` next to it (`msamp.fp8_state_dict`).

    Plain values reset the amax histories of the layer's inputs and gradients, which were measured with other weights.
    """

    scaling: LinearScaling

    def watch_weights(self) -> None:
        """Notify `scaling` when anything but the optimizer writes a weight."""
        for p in self._parameters.values():
            if isinstance(p, ScalingTensor):
                watch(p, self.scaling)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.watch_weights()

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:  # torch calls it instead of `forward` while torch.jit traces
        raise not_exportable(f"torch.jit.trace of {type(self).__name__}")

    def _apply(self, fn: Any, recurse: bool = True) -> "Loading":
        low: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, ScalingTensor)}
        for name, p in low.items():
            apply_(p, fn, name)
        try:
            self._parameters.update(dict.fromkeys(low))  # torch skips what is None
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(low)
        self.watch_weights()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any) -> None:
        for name, own in self._parameters.items():
            key = prefix + name
            given, scale_inv = state_dict.get(key), state_dict.pop(f"{key}_scale_inv", None)
            if given is None or own is None:
                continue
            if scale_inv is not None:
                state_dict[key] = ScalingTensor(given, scale_inv, own.dtype)
            elif isinstance(own, ScalingTensor) and not isinstance(given, ScalingTensor):  # as a checkpoint of MS-AMP's is
                check_finite(given, key)
                if own.payload.itemsize == 2 and own.requires_grad:
                    given = state_dict[key] = off_ties(given, self.scaling.gemm.weight, own.format)
                if local_metadata.get("assign_to_params_buffers"):
                    state_dict[key] = ScalingTensor.quantize(given, own.format, dtype=own.dtype)
            if own.dim() > 1 and not any(each.startswith(f"{prefix}scaling.") for each in state_dict):  # plain, for a float copy too
                channels = 0 if self.scaling.channels is None else self.scaling.channels.features
                fresh = LinearScaling(self.scaling.gemm, device=given.device, channels=channels)
                state_dict |= fresh.state_dict(prefix=f"{prefix}scaling.")
        with loading():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class FP8Linear(Loading, nn.Linear):
    """y = x W^T + b, all three GEMMs in FP8 (see `msamp.nn.linear_fn`).

    A subclass of torch.nn.Linear, so that adapter libraries accept it. With a plain weight, as in `msamp.float_copy`, it computes what
    torch.nn.Linear computes.

    Args:
        in_features, out_features: at least 1; the GEMMs pad to multiples of 16.
        bias: learn an additive bias of `dtype`.
        recipe: one with FP8 GEMMs, or its name (O1, O2, O3); `weight` is stored in its `weight` format.
        device, dtype: of the layer; `dtype` is also the outer dtype of the weight, and the dtype of its gradient.

    Shape: [..., in_features] -> [..., out_features] in the input's dtype.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe | str = O2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        recipe = by_name(recipe)
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or torch.nn.Linear")
        self.in_features, self.out_features = in_features, out_features
        dtype = dtype or torch.get_default_dtype()
        drawn = torch.empty(out_features, in_features, device=device, dtype=torch.promote_types(dtype, torch.float32))  # why: see Experts
        self.weight = scaling_parameter(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5)).to(dtype), recipe)
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.bias = nn.Parameter(drawn.new_empty(out_features).uniform_(-bound, bound).to(dtype)) if bias else None
        self.scaling = LinearScaling(recipe.gemm, device=drawn.device)
        self.watch_weights()

    @classmethod
    def from_linear(cls, source: nn.Linear, recipe: Recipe | str = O2, name: str = "") -> "FP8Linear":
        """Return the FP8 layer with the weights of `source` (a Conv1D for an FP8Conv1D). It keeps the bias Parameter of `source`."""
        recipe = by_name(recipe)
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or keep torch.nn.Linear")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        values = source.weight.detach()
        layer.weight = scaling_parameter(values.t() if issubclass(cls, FP8Conv1D) else values, recipe, source.weight.requires_grad, name)
        layer.out_features, layer.in_features = layer.weight.shape
        vars(layer.weight).update(vars(source.weight))  # such as _no_weight_decay, which optimizers read
        layer.bias = source.bias
        layer.scaling = LinearScaling(recipe.gemm, device=source.weight.device)
        layer.train(source.training)
        layer.watch_weights()
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input has {x.shape[-1]} features in its last dimension; this layer expects {self.in_features}")
        if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
            raise not_exportable("ONNX export of FP8Linear")
        return linear(x, self.weight, self.bias, self.scaling)

    def extra_repr(self) -> str:
        precision = describe_gemm(self.scaling.gemm, self.weight)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {precision}"


class FP8Conv1D(FP8Linear):
    """The FP8 version of the Conv1D in Hugging Face's GPT-2, a linear layer that stores its weight as [in, out].

    In memory the weight is [out, in], as the GEMMs read it; in a `state_dict` it is [in, out], as Hugging Face expects it.
    """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}weight"
        if key in state_dict:
            state_dict[key] = state_dict[key].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


def transposed_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights that a `state_dict` stores transposed."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, FP8Conv1D)
    }
