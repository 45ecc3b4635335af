"""The first token of FP8 attention, computed apart from the FP8 kernels, and the constant that is taken out of the values.

Hopper's FP8 tensor cores cut each product 13 bits below the sum so far. If the values have a mean, the sum over many keys grows and the
output shrinks: by 9 % at 8,192 tokens, by half at 131,072 (values with a mean of half their deviation, H200). So the kernels get values
without their mean per head and channel, which is added back afterwards. This is exact for any constant, since the weights sum to 1.

In trained models many heads give most of the weight to the first token (an "attention sink", Xiao et al., 2023, arXiv:2309.17453), whose
value is small. Next to it, the weights of all other keys are too small for E4M3, and the code of its value, which lies far from the mean,
has a larger error than the output itself. So the kernels get all keys but the first, and the first is merged with their result:

    w_t = 1 / (1 + exp(lse_t - s_t))        weight of the first token; s_t its score, lse_t the log-sum-exp of the other scores
    O_t = (1 - w_t) (o_t + center) + w_t v_0

Backward, with D_t = rowsum(dO_t (O_t - center)) (1 - w_t) as the kernels subtract it:

    dO'_t = (1 - w_t) dO_t                  the gradient of the kernels' output
    ds_t  = w_t (1 - w_t) dO_t (v_0 - center - o_t) softmax_scale
    dq_t += ds_t k_0,  dk_0 = sum_t ds_t q_t,  dv_0 = sum_t w_t dO_t
"""

import torch

from msamp.kernels.reference.cast_transpose import _store
from msamp.kernels.reference.rotary import _rotate
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import quantize


def attention_sink(key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, skip: int) -> torch.Tensor:
    """Return the first token's rotated key and its value, and the mean of the values of the tokens from `skip` on.

    Args:
        key, value: [s, b, groups, d] before the rotary embedding, of one dtype and any strides of the first three dimensions.
        cos, sin: FP32 [at least 1, r], the tables of the rotary embedding, of which row 0 is used.
        skip: number of tokens that the mean leaves out, less than s.

    Returns:
        FP32 [3, b, groups, d]: the key, rounded to its dtype as `rotary_` does; the value; the mean, 0 if no token is left.
    """
    first = key[:1].unsqueeze(3).clone()
    r = cos.shape[1]
    first[..., :r] = _rotate(first[..., :r], cos[:1, None], sin[:1, None]).to(key.dtype)
    mean = value[skip:].float().sum(0) / max(1, value.shape[0] - skip)
    return torch.stack([first[0, :, :, 0].float(), value[0].float(), mean])


def sink_center_(sink: torch.Tensor, value: torch.Tensor, scale_inv: torch.Tensor, skip: int) -> None:
    """Subtract the mean of FP8 values from the third part of `sink`, in place.

    The mean of the values less the mean of their codes is the constant that must be added to the kernels' output: not the constant that was
    subtracted before the cast, since subtracting a number smaller than the spacing of BF16 changes no code.

    Args:
        sink: of `attention_sink`.
        value: [s, b, groups, d] E4M3, contiguous.
        scale_inv: FP32 0-dim.
        skip: as in `attention_sink`.
    """
    sink[2].sub_(value[skip:].float().sum(0) / max(1, value.shape[0] - skip) * scale_inv)


def _merged(
    query: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, scale_invs: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the first token's weights [s, b, heads, 1]; and FP32 [s, b, heads, d] the kernels' output without the center, the output, and
    by head the center and the first token's key and value, [b, heads, d]."""
    s, b, heads, d = query.shape
    skip = s - o.shape[0]
    key, first, center = (x.repeat_interleave(heads // x.shape[1], 1) for x in sink)
    score = (query.float() * key).sum(-1) * (scale_invs[0] * softmax_scale)
    others = torch.full((s, b, heads), -torch.inf, device=query.device)
    others[skip:] = lse.view(b, heads, s - skip).permute(2, 0, 1)
    w = (1 / (1 + (others - score).exp()))[..., None]
    rest = torch.zeros(s, b, heads, d, device=query.device)
    rest[skip:] = o.float() * scale_invs[1]
    return w, rest, (1 - w) * (rest + center) + w * first, center, key, first


def sink_merge(
    query: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    scale_invs: torch.Tensor,
    softmax_scale: float,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the first token and the center with the kernels' output, and cast the result.

    Args:
        query: [s, b, heads, d] E4M3, contiguous, as are the others.
        o: [s, b, heads, d] E4M3, the kernels' output over all keys but the first; [s - 1, b, heads, d] if the first query has no other key.
        lse: FP32, b x heads x the rows of `o`: the logarithm of the sum of each row.
        sink: FP32 [3, b, groups, d], the first token's key and value, and the center.
        scale_invs: FP32 [2], of `query` and `o`.
        softmax_scale: factor of the scores.
        scale, amax_slot, dtype, scale_inv_slot: as in `cast_transpose`; a wide dtype gives plain values and ignores the three.

    Returns:
        The output [s, b, heads, d] of `dtype`, and its scale_inv, empty if a slot is given.
    """
    merged = _merged(query, o, lse, sink, scale_invs, softmax_scale)[2]
    payload, _, scale_inv, _ = _store(merged.flatten(0, 1).flatten(1), scale, amax_slot, dtype, False, False, scale_inv_slot)
    return payload.view(query.shape), scale_inv


def sink_backward(
    grad_o: torch.Tensor,
    query: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    scale_invs: torch.Tensor,
    softmax_scale: float,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    value_scale_inv: torch.Tensor,
    output_scale_inv: torch.Tensor | None,
    *,
    scale_inv_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare the gradient kernels' arguments, and compute what the first token adds to the gradients.

    Args:
        grad_o: gradient of the output, [s, b, heads, d] in the compute dtype, contiguous.
        query, o, lse, sink, scale_invs, softmax_scale: as for `sink_merge`.
        scale, amax_slot, scale_inv_slot: of dO'.
        dtype: of dO': E5M2; a wide dtype gives plain values, for a watch.
        value_scale_inv: FP32 0-dim, of the values: the scale with which O - center is cast too, which is no larger than they are.
        output_scale_inv: FP32 0-dim, of the output's codes; None does not compute them.

    Returns:
        dO' in the shape of `o`, and O - center in that shape, E4M3; the codes of the output [s, b, heads, d] E4M3; ds FP32 [s, b, heads];
        scale_inv of dO', empty if a slot is given; sums of parts of the rows, FP32 [parts, 2 * b * heads * d]: dk_0 and dv_0 by head.
    """
    (s, b, heads, d), skip = query.shape, query.shape[0] - o.shape[0]
    w, rest, merged, center, _, first = _merged(query, o, lse, sink, scale_invs, softmax_scale)
    grad = grad_o.float()
    payload, _, scale_inv, _ = _store(
        ((1 - w) * grad)[skip:].flatten(0, 1).flatten(1), scale, amax_slot, dtype, False, False, scale_inv_slot
    )
    centered = quantize((merged - center)[skip:], 1 / value_scale_inv, E4M3).contiguous()
    codes = query.new_empty(0) if output_scale_inv is None else quantize(merged, 1 / output_scale_inv, E4M3)
    ds = (w * (1 - w))[..., 0] * (grad * (first - center - rest)).sum(-1) * softmax_scale
    of_key = (ds[..., None] * query.float()).sum(0) * scale_invs[0]
    sums = torch.stack([of_key, (w * grad).sum(0)]).view(1, -1)
    return payload.view(s - skip, b, heads, d), centered, codes, ds, scale_inv, sums
