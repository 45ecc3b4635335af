"""The expert layer of a mixture of experts: the SwiGLU MLPs between router and sum, as one module.

    y = sum over the chosen e of p_e W2_e (silu(G_e x) * (U_e x))        W1_e = [G_e; U_e]

Why one module and not a linear layer per product? Between the two products the rows of all experts stay in the order of the experts, and
in FP8 everything between them is one kernel (`msamp.nn.experts`). Two layers would have to pass that order on, and would cast twice.

As built, the layer is plain torch, with `torch.nn.functional.grouped_mm` where that runs.

Next: `msamp.nn.experts` has the FP8 products.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from msamp.kernels import ops
from msamp.nn.experts import check_tokens

_ALIGNED = 16  # bytes between rows that torch's grouped_mm requires


class Experts(nn.Module):
    """The experts of one layer: y = sum over a token's choices of p_e W2_e (silu(G_e x) * (U_e x)).

    The name is the field's for the module between router and sum; an `ExpertLinear` would be only one of its two products.

    Args:
        num_experts: E, those of this rank, at least 1.
        hidden_size: H.
        ffn_hidden_size: F, the width of one expert's activation.
        device, dtype: of the weights: torch.float32, torch.bfloat16 or torch.float16.

    Attributes:
        fc1_weight: [E, 2F, H], gate before up.
        fc2_weight: [E, H, F].

    Shape: x [tokens, H] in the weights' dtype, probs FP32 [tokens, top-k], experts integers [tokens, top-k] -> [tokens, H] in the dtype of
    x. A choice of a negative expert (-1: an expert of another rank) adds nothing, and its probability has no gradient. Indices of E and
    above are not checked on a GPU, since that would wait for it.

    Raises:
        ValueError: for sizes below 1, or inputs of other shapes or dtypes.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(num_experts, hidden_size, ffn_hidden_size) < 1:
            raise ValueError(
                f"there are {num_experts} experts of width {ffn_hidden_size} for {hidden_size} features; all three must be at least 1"
            )
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, 2 * ffn_hidden_size, hidden_size, device=device, dtype=dtype))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert's matrices as torch.nn.Linear does."""
        for weight in (self.fc1_weight, self.fc2_weight):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return plain_experts(x, probs, experts, self.fc1_weight, self.fc2_weight)

    def extra_repr(self) -> str:
        count, hidden, width = self.fc2_weight.shape
        return f"{count} experts, {hidden}, {width}"


def plain_experts(
    x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor
) -> torch.Tensor:
    """Compute the experts in plain torch: products in the dtype of the weights (under autocast in its dtype), SwiGLU, probability and the
    sum over a token's experts in FP32. Arguments, shapes and errors as in `Experts`; no shape depends on the choices.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, fc1_weight, fc2_weight = x.to(dtype), fc1_weight.to(dtype), fc2_weight.to(dtype)
    check_tokens(x, probs, experts, fc1_weight.shape, fc2_weight.shape)
    if not x.dtype == fc1_weight.dtype == fc2_weight.dtype:
        raise ValueError(f"x is {x.dtype} and the weights {fc1_weight.dtype} and {fc2_weight.dtype}; use one dtype, or torch.autocast")
    offsets, source, places = ops.group_tokens(experts, fc1_weight.shape[0], 1)
    rows = _Gather.apply(x, source, places)
    weights = torch.where(source >= 0, probs.reshape(-1)[source.clamp(min=0)], 0.0)
    gate, up = _grouped(rows, fc1_weight, offsets).float().chunk(2, 1)
    activated = (F.silu(gate) * up * weights.unsqueeze(1)).to(x.dtype)
    return _Sum.apply(_grouped(activated, fc2_weight, offsets), source, places)


class _Gather(torch.autograd.Function):
    """(x [tokens, H], source, places) -> the rows of all experts [R, H], zeros where `source` is -1. Its gradient is `_Sum`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(source, places)
        return x[(source.clamp(min=0) // max(1, places.shape[1])).long()].masked_fill_((source < 0).unsqueeze(1), 0.0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def, override]
        return _Sum.apply(grad, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    """(rows of all experts [R, H], source, places) -> the sum of each token's rows [tokens, H], rounded once. Its gradient is `_Gather`.

    It reads only the rows of `places`: grouped_mm leaves the rows after the last expert's undefined."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(source, places)
        return ops.unpermute(rows, places)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def, override]
        return _Gather.apply(grad, *ctx.saved_tensors), None, None


def _grouped(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its weight [N, K]; rows after the last expert's are undefined."""
    if _torch_multiplies(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
    products, start = [], 0
    for e, end in enumerate(offsets.tolist()):
        products.append(rows[start:end] @ weight[e].t())
        start = end
    return torch.cat([*products, rows.new_zeros(len(rows) - start, weight.shape[1])])


def _torch_multiplies(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's grouped_mm supports the operands: it requires rows that begin at multiples of 16 bytes, and an Ampere GPU."""
    if not hasattr(F, "grouped_mm") or not rows.numel() or any(size * rows.element_size() % _ALIGNED for size in weight.shape[1:]):
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)
