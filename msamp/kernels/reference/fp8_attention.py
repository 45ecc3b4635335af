"""FP8 attention in plain torch: the definition with which cuDNN's kernels must agree (`msamp.kernels.fp8_attention`).

GEMMs multiply FP8 values and accumulate in FP32; inside `accumulating("hopper")` as the kernels do (`msamp.numerics.accumulation`), but for
their order and the rescaling of partial rows. Between the two GEMMs of forward, and of backward, an s x s tensor is cast to FP8: the
softmax S to E4M3, and in backward the gradient of the scores, dP, to E5M2. Forward casts exp(score - largest score of the row) and divides
by the sum of the row after the GEMM, like a kernel that never has a whole row. Backward casts the softmax itself, recomputed from the
scores and the logarithm of that sum.
"""

from typing import NamedTuple

import torch

from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.attention_part import by_head, check_parts, masked, over_groups
from msamp.numerics import accumulation
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.quantize import quantize

# No element of S is above 1, and with a causal mask the first row is 1: the scale is known without an amax.
SOFTMAX_SCALE = 256.0


class AttentionScales(NamedTuple):
    """The scales for backward, on the device.

    Attributes:
        qkv: FP32 [3], scale_inv of queries, keys and values.
        o, grad_o: FP32 0-dim, scale_inv of the output and of its gradient.
        gradients: FP32 [4], the scales of dP, dQ, dK and dV.
        dp_scale_inv: FP32 0-dim, the inverse of dP's scale.
    """

    qkv: torch.Tensor
    o: torch.Tensor
    grad_o: torch.Tensor
    gradients: torch.Tensor
    dp_scale_inv: torch.Tensor


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale_invs: torch.Tensor,
    o_scale: torch.Tensor,
    softmax_scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute scaled dot product attention with FP8 queries, keys and values.

    Args:
        query: [s, b, heads, d] E4M3.
        key, value: [keys, b, groups, d] E4M3, with a causal mask as many keys as queries.
        scale_invs: FP32 [3], of query, key and value.
        o_scale: FP32 0-dim, a power of two: the scale of the output.
        softmax_scale: factor of the scores.
        causal: whether a token attends only to itself and earlier tokens.

    Returns:
        Output [s, b, heads, d] E4M3; for backward the logarithm of the sum of each row, FP32 [b, heads, s, 1]; the amax of the output
        before its cast, FP32 0-dim.

    Raises:
        ValueError: if shapes do not match.
    """
    check_parts(query, key, value, causal=causal)
    q, k, v = (by_head(x, query.shape[2]) for x in (query, key, value))
    scores = _scores(q, k, scale_invs, softmax_scale, causal)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    p8 = quantize(p, p.new_tensor(SOFTMAX_SCALE), E4M3).float()
    o = _product(p8, v, E4M3, E4M3) * (scale_invs[2] / SOFTMAX_SCALE) / total
    return quantize(_by_token(o), o_scale, E4M3).contiguous(), top + total.log(), amax(o)


def attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    o: torch.Tensor,
    grad_o: torch.Tensor,
    stats: torch.Tensor,
    scales: AttentionScales,
    softmax_scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of `attention_forward`.

    Args:
        query, key, value, softmax_scale, causal: as for `attention_forward`.
        o, stats: as returned by `attention_forward`. If key and value are a part of those of the queries, the output and the logarithm of
            the whole attention (`msamp.parallel.fp8_ring_attention`).
        grad_o: [s, b, heads, d] E5M2.
        scales: of all inputs and outputs.

    Returns:
        dQ [s, b, heads, d], dK and dV [keys, b, groups, d], E5M2; the amaxes of dP, dQ, dK and dV before their casts, FP32 [4].

    Raises:
        ValueError: if shapes do not match.
    """
    check_parts(query, key, value, causal=causal)
    groups = key.shape[2]
    q, k, v, out, grad = (by_head(x, query.shape[2]) for x in (query, key, value, o, grad_o))
    of_q, of_k, of_v = scales.qkv
    p = (_scores(q, k, scales.qkv, softmax_scale, causal) - stats).exp()
    p8 = quantize(p, p.new_tensor(SOFTMAX_SCALE), E4M3).float()
    dv = over_groups(_product(p8.transpose(2, 3), grad, E4M3, E5M2), groups) * (scales.grad_o / SOFTMAX_SCALE)
    row = (grad * out).sum(-1, keepdim=True) * (scales.grad_o * scales.o)
    dp = p * (_product(grad, v.transpose(2, 3), E5M2, E4M3) * (scales.grad_o * of_v) - row) * softmax_scale
    dp8 = quantize(dp, scales.gradients[0], E5M2).float()
    dq = _product(dp8, k, E5M2, E4M3) * (scales.dp_scale_inv * of_k)
    dk = over_groups(_product(dp8.transpose(2, 3), q, E5M2, E4M3), groups) * (scales.dp_scale_inv * of_q)
    codes = [quantize(_by_token(x), scale, E5M2).contiguous() for x, scale in zip((dq, dk, dv), scales.gradients[1:], strict=True)]
    return codes[0], codes[1], codes[2], torch.stack([amax(x) for x in (dp, dq, dk, dv)])


def _product(a: torch.Tensor, b: torch.Tensor, a_format: Format, b_format: Format) -> torch.Tensor:
    """Return a @ b, FP32, of values that the formats represent."""
    if accumulation.like_hopper():
        return accumulation.product(a.to(a_format.dtype), b.to(b_format.dtype).mT, "fast")
    return a @ b


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] -> [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, scale_invs: torch.Tensor, softmax_scale: float, causal: bool) -> torch.Tensor:
    return masked(_product(q, k.transpose(2, 3), E4M3, E4M3) * (scale_invs[0] * scale_invs[1] * softmax_scale), causal)
