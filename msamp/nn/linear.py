"""FP8Linear: a drop-in for torch.nn.Linear (FP8-LM section 2).

What: y = x W^T + b with x [..., K], W [N, K], b [N] and y [..., N] in the dtype of x. The weight is stored in 8 or 16 bits with one scale.
The bias keeps its dtype. With q(t) = round(s_t t) in FP8 and g the gradient of y, M tokens give three GEMMs:

    y  = (q(x) q(W)^T) / (s_x s_W) + b     [M, N]     sums over K     fast accumulation
    dx = (q(g) q(W)) / (s_g s_W)           [M, K]     sums over N     full accumulation
    dW = (q(g)^T q(x)) / (s_g s_x)         [N, K]     sums over M     full accumulation

Formats and scales by default, where each scale is a power of two and one serves the whole tensor:

    tensor   stored between steps    operand    scale                        kept from forward to backward
    x        -                       E4M3       delayed: history of amaxes   q(x)^T, one byte an element
    W        O1, O2: FP16 scaled     E4M3       from its amax, once a step   the stored payload; its cast is made again
    W        O3: E4M3                as stored  the optimizer's              the stored payload
    g        -                       E5M2       delayed: history of amaxes   -
    dW       -                       -          -                            the dtype that W shows; the exchange casts it to E4M3

g takes E5M2 for its range, and x and W take E4M3 for its digits. The full sum of the two gradient GEMMs costs 3 to 8 % of their time
(`tools/bench/LOG.md`). It is the default; `Gemms.all_fast` does without.

Why a layer and not a cast around a layer: three things live from step to step. The first is the stored weight: the optimizer writes what
the GEMM reads, and no copy of higher precision exists beside it. The second is the amax histories (`LinearScaling`): a delayed scale is
known before its tensor is read, so that one pass casts, transposes and takes the next amax. The third is the FP8 scale of a 16-bit weight,
which all micro-batches of a step share. `ScalingState` rolls the histories of all layers once a step.

Why a subclass of torch.nn.Linear: adapter libraries look for that class. `weight` is a Parameter that holds a ScalingTensor and looks like
BF16 or FP32 to them. A weight that is loaded from plain values is cast anew, and the histories of the layer begin anew with it.

Until a history is filled, 16 steps by default, the scale comes just in time from the tensor itself. A value that is not finite makes the
results of its GEMMs NaN, and the optimizer skips the step.

What was tried: just-in-time scales for all operands (`tensorwise`) read each tensor twice. A scale for each block (`blockwise`) casts input
and gradient once for each GEMM. Both are recipes, and slower: a step of GPT-1.3B at O2 took 100.2 ms delayed, 109.2 tensorwise and 154.5
blockwise (`tools/bench/results/step.csv`, commit 130f7fa, one H200). Smaller layers gain less: the FP8 layer alone is 1.31 times as fast as
BF16 at a width of 2,048, and 1.80 times at 8,192 (`tools/bench/LOG.md`).

Where to read on: `linear_fn` is the autograd function, and `gemm` has the three GEMMs. Dimensions are padded to multiples of 16, which the
hardware demands; the padding is zeros and changes no sum.
"""

import math
from typing import Any

import torch
from torch import nn

from msamp.nn.linear_fn import linear
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.lost_writes import loading
from msamp.numerics.recipe import O2, Gemms, Recipe
from msamp.numerics.tensor import ScalingTensor
from msamp.numerics.tensor_ops import watch


def check_finite(values: torch.Tensor, name: str) -> None:
    """ValueError naming the weight where a value is NaN or infinite."""
    bad = int((~torch.isfinite(values.detach())).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} values that are NaN or infinite; a weight must be finite: check the checkpoint it came from")


def scaling_parameter(values: torch.Tensor, recipe: Recipe, requires_grad: bool = True, name: str = "") -> nn.Parameter:
    """A Parameter that holds `values` (any float dtype) in the recipe's weight format and looks like their dtype; `name` is that in
    the model, for messages.

    Raises:
        ValueError: where a value is NaN or infinite.
    """
    check_finite(values, name or "weight")
    stored = ScalingTensor.quantize(values.contiguous(), recipe.weight)
    if name:
        stored.label = name
    return nn.Parameter(stored, requires_grad)


def describe_gemm(gemm: Gemms, weight: torch.Tensor) -> str:
    """One line for `print(model)`: what is stored and what the GEMMs run in."""
    if not isinstance(weight, ScalingTensor):  # of a float copy, or computed from a weight: pruning, torch's parametrizations
        return f"weight {weight.dtype}, multiplied in that dtype and not in FP8"
    stored = weight.format
    blocks = "" if gemm.tensorwise else f", {' x '.join(str(cast.granularity) for cast in (gemm.input, gemm.weight))}"
    return f"weight {stored}, GEMM {gemm.input.format} x {gemm.weight.format}, grad_output {gemm.grad_output.format}{blocks}"


class Loading(nn.Module):
    """A module that takes its low-precision weights from any form in which they are kept: the exact one (a ScalingTensor), plain values of
    any float dtype, or a payload with `<name>_scale_inv` beside it (`msamp.fp8_state_dict`).

    With plain values come no scales: those of its inputs and gradients start anew, since what was seen of other weights says nothing of
    these.
    """

    scaling: LinearScaling

    def watch_weights(self) -> None:
        """Let `scaling` know when somebody other than the optimizer writes a weight."""
        for p in self._parameters.values():
            if isinstance(p, ScalingTensor):
                watch(p, self.scaling)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.watch_weights()

    def _apply(self, fn: Any, recurse: bool = True) -> "Loading":
        super()._apply(fn, recurse)
        self.watch_weights()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any) -> None:
        for name, own in self._parameters.items():
            key = prefix + name
            given, scale_inv = state_dict.get(key), state_dict.pop(f"{key}_scale_inv", None)
            if given is None or own is None or isinstance(given, ScalingTensor):
                continue
            if scale_inv is not None:
                state_dict[key] = ScalingTensor(given, scale_inv, own.dtype)
            elif isinstance(own, ScalingTensor):
                check_finite(given, key)
                if local_metadata.get("assign_to_params_buffers"):
                    state_dict[key] = ScalingTensor.quantize(given, own.format, dtype=own.dtype)
                if not any(each.startswith(f"{prefix}scaling.") for each in state_dict):
                    fresh = LinearScaling(self.scaling.gemm, device=self.scaling.amax.device)
                    state_dict |= fresh.state_dict(prefix=f"{prefix}scaling.")
        with loading():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class FP8Linear(Loading, nn.Linear):
    """y = x W^T + b, all three GEMMs in FP8 (see `msamp.nn.linear_fn`).

    It is a subclass of torch.nn.Linear, so that adapter libraries take it. A plain weight, of `msamp.float_copy`, multiplies as in torch.

    Args:
        in_features, out_features: at least 1; the GEMMs pad to multiples of 16.
        bias: learn an additive bias of `dtype`.
        recipe: one with FP8 GEMMs (O1, O2, O3); its `weight` format is how `weight` is stored.
        device, dtype: of the layer; `dtype` is what the weight looks like and its gradient's dtype.

    Shape: [..., in_features] -> [..., out_features] in the input's dtype.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe = O2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or torch.nn.Linear")
        self.in_features, self.out_features = in_features, out_features
        values = torch.empty(out_features, in_features, device=device, dtype=dtype)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        self.weight = scaling_parameter(values, recipe)
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound)) if bias else None
        self.scaling = LinearScaling(recipe.gemm, device=values.device)
        self.watch_weights()

    @classmethod
    def from_linear(cls, source: nn.Linear, recipe: Recipe = O2, name: str = "") -> "FP8Linear":
        """The FP8 layer with the weights of `source`, for an FP8Conv1D a Conv1D; its bias Parameter is taken over as it is."""
        if recipe.gemm is None:
            raise ValueError(f"recipe {recipe.name} has no FP8 GEMM; use O1, O2 or O3, or keep torch.nn.Linear")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        values = source.weight.detach()
        layer.weight = scaling_parameter(values.t() if issubclass(cls, FP8Conv1D) else values, recipe, source.weight.requires_grad, name)
        layer.out_features, layer.in_features = layer.weight.shape
        vars(layer.weight).update(vars(source.weight))  # such as _no_weight_decay, by which optimizers and others know a weight
        layer.bias = source.bias
        layer.scaling = LinearScaling(recipe.gemm, device=source.weight.device)
        layer.train(source.training)
        layer.watch_weights()
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input has {x.shape[-1]} features in its last dimension, this layer takes {self.in_features}")
        return linear(x, self.weight, self.bias, self.scaling)

    def extra_repr(self) -> str:
        precision = describe_gemm(self.scaling.gemm, self.weight)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {precision}"


class FP8Conv1D(FP8Linear):
    """A Conv1D of Hugging Face's GPT-2, which is a linear layer that keeps its weight as [in, out], in FP8.

    Here the weight is [out, in], as the GEMMs read it; in a `state_dict` it stands as the host has it.
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
    """The names of the weights that stand the other way round in a `state_dict`."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, FP8Conv1D)
    }
