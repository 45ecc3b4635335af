"""The experts of a mixture of experts in FP8, from the router's choice to the weighted sum, as one autograd function.

A token x of a mixture of experts goes to top-k experts, each a SwiGLU MLP, and their results are added with the router's probabilities p:

    y = sum over the chosen e of p_e W2_e (silu(G_e x) * (U_e x))        W1_e = [G_e; U_e]

Around the grouped GEMMs nothing is read twice. The function casts a token once, before its row is copied to its experts: the copies move
one byte per element. SwiGLU, the probability, the cast and the amax are one kernel, and the rows of a token are added in FP32 while they
are brought back. Backward works the same way: grad_output is cast once per token, and the gradient of FC1's output is cast by the kernel
that computes it. So there are two casts forward and two backward, each with one scale per tensor:

    tensor                    rows              operand    scale      saved for backward
    x                         tokens            E4M3       delayed    1 byte per element of a token, not of a row
    FC1's output              tokens x top-k    -          -          16 bits: the only saved tensor that grows with top-k; or
                                                                      computed again (`ExpertSettings.recompute`)
    SwiGLU's result           tokens x top-k    E4M3       delayed    -, computed again
    grad_output               tokens            E5M2       delayed    -
    FC1's grad_output         tokens x top-k    E5M2       delayed    -

Shapes never depend on the router's choices, and the host never reads them: a CUDA graph holds the whole function. With experts on other
ranks, tokens and grad_output are gathered after their cast, and the sums of the other two are scattered (`msamp.nn.expert_ranks`).

Next: `msamp.kernels.triton.grouped_mm` explains the GEMMs and `msamp.kernels.reference.group_tokens` the order of the rows.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from msamp.kernels import ops
from msamp.kernels.reference.expert_swiglu import expert_swiglu_gradient
from msamp.kernels.reference.grouped_mm import GROUP_ALIGNMENT
from msamp.nn.cast_scales import CastScales
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.expert_ranks import ExpertRanks
from msamp.nn.gemm import cast_operand
from msamp.numerics.accumulation import tally_grouped_
from msamp.numerics.recipe import Cast, Gemms


class ExpertWeights(NamedTuple):
    """The weights of all experts as operands of the GEMMs, as `ops.expert_cast` returns them.

    Attributes:
        rows: FP8 [E, N, K].
        columns: FP8 [E, K, N], for grad_input.
        scale_inv: FP32 [E].
        tallies: by product, where to compare its sums with exact ones (`LinearScaling.sums`); None: nowhere.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    scale_inv: torch.Tensor
    tallies: Mapping[str, tuple[torch.Tensor, ...]] | None = None


class ExpertSettings(NamedTuple):
    """The arguments of `ExpertsFunction` that are not tensors of the autograd graph.

    Attributes:
        gemm: casts and accumulation; one scale per tensor.
        fc1, fc2: the weights as operands.
        x, activated: slots of the inputs of FC1 and FC2.
        grad_fc1, grad_fc2: slots of the gradients of their outputs.
        ranks: that share the experts; None if this rank has all of them.
        recompute: backward computes FC1's output again from the saved codes of x, with the same bits, instead of saving it.
    """

    gemm: Gemms
    fc1: ExpertWeights
    fc2: ExpertWeights
    x: CastScales
    activated: CastScales
    grad_fc1: CastScales
    grad_fc2: CastScales
    ranks: ExpertRanks | None = None
    recompute: bool = False

    def start_cast(self, x: torch.Tensor, slot: CastScales, cast: Cast, label: str) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Cast this rank's rows [T, H] with the scale of all ranks; return scale_inv and a function that waits for the codes of all."""
        ranks = self.ranks
        if ranks is None:
            operand = cast_operand(x, slot, cast)
            return operand.scale_inv, lambda: operand.codes
        if not ranks.fp8:
            gathered = cast_operand(ranks.start_gather(x, label)(), slot, cast)
            return gathered.scale_inv, lambda: gathered.codes
        own = cast_operand(x, slot, cast, combine=ranks.shared_amax)
        return own.scale_inv, ranks.start_gather(own.codes, label)

    def start_sum(self, partial: torch.Tensor, cast: Cast, label: str) -> Callable[[], torch.Tensor]:
        """Return a function that waits for this rank's rows of the sum over the ranks; `cast`: of the sums, if they travel in FP8."""
        ranks = self.ranks
        if ranks is None:
            return lambda: partial
        if not ranks.fp8_sums:
            return ranks.start_sum(partial, label)
        codes = cast_operand(partial, CastScales(None, None, None), cast, combine=ranks.shared_amax)
        return ranks.start_sum(codes.codes, label, codes.scale_inv, partial.dtype)

    def fc1_output(self, x8: torch.Tensor, scale_inv: torch.Tensor, groups: "ExpertGroups", top_k: int, dtype: torch.dtype) -> torch.Tensor:
        """Return FC1's output [R, 2F] from the codes of the tokens."""
        rows, _ = ops.permute(x8, groups.source, top_k, row=True, end=groups.end)
        return groups.product("output", rows, self.fc1, scale_inv, dtype, fast=self.gemm.output.fast)


class ExpertGroups(NamedTuple):
    """The rows of all experts, as `ops.group_tokens` and `ops.grouped_tiles` return them."""

    offsets: torch.Tensor
    source: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """The end of the last expert's rows, int32 [1]. Rows from there on are room for another load: no kernel computes them."""
        return self.offsets[-1:]

    def product(
        self, name: str, x: torch.Tensor, w: ExpertWeights, scale_inv: torch.Tensor, dtype: torch.dtype, *, fast: bool
    ) -> torch.Tensor:
        """Return the "output" `x W^T`, or for a gradient `x` the "grad_input" `x W`, of every expert, of its rows of `x`."""
        matrices = w.rows if name == "output" else w.columns
        y = ops.grouped_mm(x, matrices, self.offsets, scale_inv, w.scale_inv, dtype, fast_accum=fast, tiles=self.tiles)
        if w.tallies is not None:
            tally_grouped_(w.tallies[name], y, x, matrices, self.offsets, scale_inv * w.scale_inv)
        return y

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> "ExpertGroups":
        """Group the tokens of `experts` [tokens, top-k] by `count` experts."""
        offsets, source, places = ops.group_tokens(experts, count, GROUP_ALIGNMENT)
        return cls(offsets, source, places, ops.grouped_tiles(offsets, source.shape[0], GROUP_ALIGNMENT))


def check_tokens(x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, fc1: torch.Size, fc2: torch.Size, ranks: int = 1) -> None:
    """Raise a ValueError if the shapes of the weights, `fc1` and `fc2`, do not fit each other, x, probs and experts. `ranks`: whose tokens
    probs and experts are for."""
    tokens, hidden = x.shape if x.ndim == 2 else (-1, -1)
    if tokens < 0 or probs.dtype != torch.float32 or probs.ndim != 2 or probs.shape != experts.shape or probs.shape[0] != ranks * tokens:
        of_all = f"{ranks} x " if ranks > 1 else ""
        raise ValueError(
            f"x is {tuple(x.shape)}, probs are {probs.dtype} {tuple(probs.shape)} and experts {tuple(experts.shape)}; they must be "
            f"[tokens, hidden], torch.float32 [{of_all}tokens, top-k] and [{of_all}tokens, top-k]"
        )
    if (tuple(fc1), tuple(fc2)) != ((fc1[0], 2 * fc2[-1], hidden), (fc1[0], hidden, fc2[-1])):
        raise ValueError(
            f"weights are {tuple(fc1)} and {tuple(fc2)} for {hidden} features; they must be [E, 2F, hidden] and [E, hidden, F]"
        )


class ExpertsFunction(torch.autograd.Function):
    """(x, probs, experts, W1, W2, settings) -> y.

    x is [tokens, hidden] BF16, FP16 or FP32, probs FP32 and experts integers [tokens, top-k], W1 [E, 2F, hidden] and W2 [E, hidden, F]. A
    choice of a negative expert, one of another rank, adds nothing and has no gradient. The weights are arguments for their gradients, which
    have their dtype; `settings` holds their FP8 operands. y has the dtype of x. With `settings.ranks`, x and y are this rank's tokens, and
    probs and experts cover all ranks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor,
        experts: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc2_weight: torch.Tensor,
        settings: ExpertSettings,
    ) -> torch.Tensor:
        gemm, top_k = settings.gemm, probs.shape[1]
        if not gemm.fusible:
            raise ValueError(
                f"experts need one scale per tensor, from its amax or history; input is cast as {gemm.input}: use O1, O2 or O3"
            )
        check_tokens(x, probs, experts, fc1_weight.shape, fc2_weight.shape, 1 if settings.ranks is None else settings.ranks.ranks)
        x_scale_inv, gathered = settings.start_cast(x, settings.x, gemm.input, "expert tokens all-gather")
        groups = ExpertGroups.of(experts, settings.fc1.rows.shape[0])
        x8 = gathered()
        y = settings.fc1_output(x8, x_scale_inv, groups, top_k, x.dtype)
        weights = torch.where(groups.source >= 0, probs.reshape(-1)[groups.source.clamp(min=0)], 0.0)
        slot = settings.activated
        end = groups.end if slot.watch is None else None  # what watches reads all rows
        if end is None:
            y = y.masked_fill(groups.source[:, None] < 0, 0.0)
        a8, a_scale_inv = ops.expert_swiglu(y, weights, slot.scale, slot.amax, gemm.input.format.dtype, end=end)
        if slot.watch is not None:
            slot.watch(ops.expert_swiglu(y, weights, None, None, torch.float32)[0], a8, a_scale_inv)
        rows = groups.product("output", a8, settings.fc2, a_scale_inv, x.dtype, fast=gemm.output.fast)
        partial = ops.unpermute(rows, groups.places)
        out = settings.start_sum(partial, gemm.input, "expert output reduce-scatter")()
        ctx.save_for_backward(x8, x_scale_inv, None if settings.recompute else y, weights, a_scale_inv, *groups)
        ctx.settings, ctx.weight_dtypes, ctx.top_k, ctx.dtype = settings, (fc1_weight.dtype, fc2_weight.dtype), top_k, x.dtype
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x8, x_scale_inv, y, weights, a_scale_inv, *held = ctx.saved_tensors
        settings, groups, dtype = ctx.settings, ExpertGroups(*held), grad_output.dtype
        needs_x, needs_probs, _, needs_fc1, needs_fc2, _ = ctx.needs_input_grad
        gemm = settings.gemm
        g_scale_inv, gathered = settings.start_cast(
            grad_output.contiguous(), settings.grad_fc2, gemm.grad_output, "expert grad_output all-gather"
        )
        rows, rows_t = ops.permute(gathered(), groups.source, ctx.top_k, row=True, col=True, end=groups.end)
        fast = gemm.grad_input.fast
        grad_a = groups.product("grad_input", rows, settings.fc2, g_scale_inv, dtype, fast=fast)
        del rows
        y = settings.fc1_output(x8, x_scale_inv, groups, ctx.top_k, ctx.dtype) if y is None else y
        slot, cast = settings.grad_fc1, gemm.grad_output.format.dtype
        end = groups.end if slot.watch is None else None
        if end is None:
            y, grad_a = (rows.masked_fill(groups.source[:, None] < 0, 0.0) for rows in (y, grad_a))
        grad_y, grad_y_t, y_scale_inv, a_t, parts = ops.expert_swiglu_backward(
            grad_a, y, weights, a_scale_inv, gemm.input.format.dtype, slot.scale, slot.amax, cast, end=end
        )
        if slot.watch is not None:
            slot.watch(expert_swiglu_gradient(grad_a, y, weights), grad_y, y_scale_inv)

        def grad_weight(
            g_t: torch.Tensor, x_t: torch.Tensor, w: ExpertWeights, g: torch.Tensor, x: torch.Tensor, dtype: torch.dtype
        ) -> torch.Tensor:
            grad = ops.grouped_mm_grad_weight(g_t, x_t, groups.offsets, g, x, dtype, fast_accum=gemm.grad_weight.fast, aligned=True)
            if w.tallies is not None:
                tally_grouped_(w.tallies["grad_weight"], grad, g_t, x_t, groups.offsets, g * x)
            return grad

        grad_probs = grad_fc1 = grad_fc2 = sums = None
        if needs_fc2:
            grad_fc2 = grad_weight(rows_t, a_t, settings.fc2, g_scale_inv, a_scale_inv, ctx.weight_dtypes[1])
        del rows_t, a_t, grad_a, y
        if needs_probs:
            per_row = torch.cat([parts.sum(0), parts.new_zeros(1)])  # -1, an expert of another rank, reads the zero
            grad_probs = per_row[groups.places]
        if needs_x:
            grad_rows = groups.product("grad_input", grad_y, settings.fc1, y_scale_inv, dtype, fast=fast)
            partial = ops.unpermute(grad_rows, groups.places)
            # It travels while grad_weight is computed.
            sums = settings.start_sum(partial, gemm.grad_output, "expert grad_input reduce-scatter")
        del grad_y
        if needs_fc1:
            _, x_t = ops.permute(x8, groups.source, ctx.top_k, col=True, end=groups.end)
            grad_fc1 = grad_weight(grad_y_t, x_t, settings.fc1, y_scale_inv, x_scale_inv, ctx.weight_dtypes[0])
        return None if sums is None else sums(), grad_probs, None, grad_fc1, grad_fc2, None
