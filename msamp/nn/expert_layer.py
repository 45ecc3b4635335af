"""The expert layer of a mixture of experts: the SwiGLU MLPs between router and sum, as one module.

    y = sum over the chosen e of p_e W2_e (silu(G_e x) * (U_e x))        W1_e = [G_e; U_e]

Why one module and not a linear layer per product? Between the two products the rows of all experts stay in the order of the experts, and
in FP8 everything between them is one kernel (`msamp.nn.experts`). Two layers would have to pass that order on, and would cast twice.

As built, the layer is plain torch, with `torch.nn.functional.grouped_mm` where that runs. `msamp.initialize` and `msamp.convert` change it
in place: each weight becomes an `ExpertMatrices`, and the layer computes in FP8. The experts of transformers 5 become a `HostExperts`.

Next: `msamp.nn.experts` has the FP8 products, `msamp.nn.expert_matrices` the weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from msamp.kernels import ops
from msamp.nn.differentiable_once import check_transforms
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.nn.expert_ranks import ExpertRanks, GatheredTokens, SummedTokens, gathered_routing
from msamp.nn.experts import ExpertSettings, ExpertsFunction, check_tokens
from msamp.nn.linear_fn import activation

_ALIGNED = 16  # bytes between rows that torch's grouped_mm requires


class Experts(nn.Module):
    """The experts of one layer: y = sum over a token's choices of p_e W2_e (silu(G_e x) * (U_e x)).

    The name is the field's for the module between router and sum; an `ExpertLinear` would be only one of its two products.

    Args:
        num_experts: E, the number of experts on this rank, at least 1.
        hidden_size: H.
        ffn_hidden_size: F, the width of one expert's activation.
        device, dtype: of the weights: torch.float32, torch.bfloat16 or torch.float16.
        ranks: that share the experts, E on each: `msamp.parallel.expert_parallel.ExpertParallel`. Then `experts` counts over all ranks, and
            every rank has the same number of tokens. None: this rank computes its own choices only.

    Attributes:
        fc1_weight: [E, 2F, H], gate before up; once converted an `ExpertMatrices`.
        fc2_weight: [E, H, F]; likewise.
        weight_names: the names of the two attributes.
        first: the number of this rank's first expert over all ranks.
        recompute_fc1: whether backward of FP8 experts computes FC1's output again instead of saving it: a sixth more work in the products,
            for 2 bytes times top-k times 2F per token, and per token of all `ranks`. False at first; the bits are the same.

    Shape: x [tokens, H] in the weights' dtype (once converted, any of the three), probs FP32 [tokens, top-k], experts integers [tokens,
    top-k] -> [tokens, H] in the dtype of x. A choice of a negative expert (-1: an expert of another rank) adds nothing, and its probability
    has no gradient. Indices of E and above are not checked on a GPU, since that would wait for it.

    Raises:
        ValueError: for sizes below 1, or inputs of other shapes or dtypes.
    """

    weight_names = ("fc1_weight", "fc2_weight")
    ranks: ExpertRanks | None = None
    first = 0
    recompute_fc1 = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ranks: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.first = ranks, 0 if ranks is None else ranks.rank * num_experts
        if min(num_experts, hidden_size, ffn_hidden_size) < 1:
            raise ValueError(
                f"there are {num_experts} experts of width {ffn_hidden_size} for {hidden_size} features; all three must be at least 1"
            )
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, 2 * ffn_hidden_size, hidden_size, device=device, dtype=dtype))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize each expert's matrices as torch.nn.Linear does in FP32."""
        for name in self.weight_names:
            weight = getattr(self, name)
            bound = 1 / math.sqrt(weight.shape[-1])
            for p in weight.parameters() if isinstance(weight, ExpertMatrices) else [weight]:
                drawn = torch.empty(p.shape, device=p.device, dtype=torch.promote_types(p.dtype, torch.float32))
                p.copy_(drawn.uniform_(-bound, bound))  # torch's draws in BF16 are the lower bound where they round to the upper one

    def forward(self, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = (getattr(self, name) for name in self.weight_names)
        ranks = self.ranks
        if ranks is not None:
            check_tokens(x, probs, experts, fc1.shape, fc2.shape)
            ranks.check_tokens(x.shape[0])
            probs, experts = gathered_routing(probs, experts, ranks, self.first, fc1.shape[0])
        if isinstance(fc1, ExpertMatrices) and fc1.low_precision and fc2.low_precision:
            # A graph break: operands are cached by version, and torch.compile would trace E parameters. The layer is a few kernels already.
            if torch.compiler.is_compiling() and not _UNCOMPILED:
                _UNCOMPILED.append(torch.compiler.disable(_fp8_experts))  # not as a decorator, since it imports the compiler
            run = _UNCOMPILED[0] if torch.compiler.is_compiling() else _fp8_experts
            return run(self, x, probs, experts)
        weights = (fc1.stacked(), fc2.stacked()) if isinstance(fc1, ExpertMatrices) else (fc1, fc2)  # a float copy, or not converted
        if ranks is None:
            return plain_experts(x, probs, experts, *weights)
        return SummedTokens.apply(plain_experts(GatheredTokens.apply(x, ranks), probs, experts, *weights), ranks)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.weight_names:
            matrices, key = getattr(self, name), prefix + name
            if isinstance(matrices, ExpertMatrices) and key in state_dict:
                values = state_dict.pop(key)
                if values.shape != matrices.shape:
                    args[-1].append(f"size mismatch for {key}: {tuple(values.shape)} in the state, {tuple(matrices.shape)} in the model")
                    values = ()
                state_dict |= {f"{key}.{e}": value for e, value in enumerate(values, matrices.first)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        count, hidden, width = getattr(self, self.weight_names[1]).shape
        return f"{count} experts, {hidden}, {width}"


class HostExperts(Experts):
    """The converted experts of a model of transformers 5, under its names and with its order of arguments. An index of E and above, which
    marks an expert of another rank there, adds nothing."""

    weight_names = ("gate_up_proj", "down_proj")

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        here = torch.where(top_k_index < getattr(self, self.weight_names[0]).shape[0], top_k_index, -1)
        return super().forward(hidden_states, top_k_weights.float(), here).to(hidden_states.dtype)


def _fp8_experts(layer: Experts, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    fc1, fc2 = (getattr(layer, name) for name in layer.weight_names)
    check_transforms(fc1.matrices[0].label, x)
    (fc1_weight, fc1_operands), (fc2_weight, fc2_operands) = fc1(), fc2()
    record = torch.is_grad_enabled()
    x_slot, grad_fc1 = fc1.scaling.slots(record)
    activated, grad_fc2 = fc2.scaling.slots(record)
    if record:
        fc1_operands, fc2_operands = (w._replace(tallies=of.scaling.tallies) for w, of in ((fc1_operands, fc1), (fc2_operands, fc2)))
    slots = x_slot, activated, grad_fc1, grad_fc2
    settings = ExpertSettings(fc1.scaling.gemm, fc1_operands, fc2_operands, *slots, layer.ranks, layer.recompute_fc1)
    return ExpertsFunction.apply(activation(x), probs, experts, fc1_weight, fc2_weight, settings)


_UNCOMPILED: list[Callable[..., torch.Tensor]] = []  # not functools.cache, which torch.compile warns about


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
    """Multiply the rows of each expert by its weight [N, K]; rows after the last expert's are undefined.

    Raises:
        ValueError: in the capture of a CUDA graph, if the host has to read how many rows each expert has.
    """
    # torch's kernel for groups is for BF16, all else is a loop.
    if _capturing(rows) and not (rows.dtype is torch.bfloat16 and has_grouped_kernel(rows.device) and _torch_multiplies(rows, weight)):
        kind = f"{' x '.join(map(str, weight.shape[1:]))} in {str(rows.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"experts of {kind} cannot be captured in a CUDA graph, since PyTorch multiplies them one by one, by sizes that the host "
            "reads: use BF16 and widths of a multiple of 8 on a GPU of compute capability 9 or 10, convert the model to FP8, or run "
            "eager steps"
        )
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


def has_grouped_kernel(device: torch.device | None = None) -> bool:
    """Return whether PyTorch multiplies BF16 experts in one kernel on a GPU, by default the current one: compute capability 9 or 10.

    On others, such as RTX cards (12), `grouped_mm` is a loop over the experts, by sizes that the host reads.
    """
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _capturing(rows: torch.Tensor) -> bool:
    # Compiled code skips this check, which would break the graph here.
    return rows.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
