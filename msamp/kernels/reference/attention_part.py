"""Attention over a part of the keys in plain torch: the definition with which `msamp.kernels.attention_part` must agree.

A part is attention of some queries over some keys, together with the logarithm of the sum of each row's exponentials. With this logarithm
the parts of a sequence can be merged, and the backward of each part run by itself (`msamp.parallel.ring_attention`).
"""

import torch


def attention_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scaled dot product attention in FP32.

    Args:
        query: [s, b, heads, d].
        key, value: [s of the keys, b, groups, d], with groups a divisor of heads.
        softmax_scale: factor of the scores.
        causal: whether query i attends only to keys 0 to i; requires as many queries as keys.

    Returns:
        Output [s, b, heads, d] in the query's dtype, and the logarithm of the sum of each row, FP32 [b, heads, s].

    Raises:
        ValueError: if shapes do not match.
    """
    check_parts(query, key, value, causal=causal)
    scores = _scores(query, key, softmax_scale, causal=causal)
    lse = scores.logsumexp(-1)
    o = (scores - lse[..., None]).exp() @ by_head(value, query.shape[2])
    return o.permute(2, 0, 1, 3).to(query.dtype).contiguous(), lse


def attention_part_backward(
    grad_o: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute this part's share of the gradients of the whole attention, in FP32.

    Args:
        grad_o, o: [s, b, heads, d], of the whole attention, merged over all parts.
        lse: FP32 [b, heads, s], of the whole attention.
        query, key, value, softmax_scale, causal: of this part, as for `attention_part`.

    Returns:
        dQ [s, b, heads, d], dK and dV [s of the keys, b, groups, d] in the query's dtype.

    Raises:
        ValueError: if shapes do not match.
    """
    check_parts(query, key, value, causal=causal)
    heads, groups = query.shape[2], key.shape[2]
    q, k, v, grad, out = (by_head(x, heads) for x in (query, key, value, grad_o, o))
    p = (_scores(query, key, softmax_scale, causal=causal) - lse[..., None]).exp()
    ds = p * (grad @ v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * softmax_scale
    dv, dk = (over_groups(x.transpose(2, 3) @ y, groups) for x, y in ((p, grad), (ds, q)))
    dq, dk, dv = (x.permute(2, 0, 1, 3).to(query.dtype).contiguous() for x in (ds @ k, dk, dv))
    return dq, dk, dv


def check_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> None:
    """Raise a ValueError unless the query is [s, b, heads, d], and key and value are both [keys, b, groups, d] with groups a divisor of
    heads; with a causal mask, unless keys is s."""
    s, b, heads, d = query.shape
    keys, groups = key.shape[0], key.shape[2]
    if key.shape != value.shape or key.shape != (keys, b, groups, d) or not groups or heads % groups or (causal and keys != s):
        length = str(s) if causal else "keys"
        raise ValueError(
            f"key is {tuple(key.shape)}, value {tuple(value.shape)}; for a query of {tuple(query.shape)} both must be "
            f"[{length}, {b}, groups, {d}] with groups a divisor of the heads"
        )


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, b, n, d] -> [b, heads, s, d] FP32, repeating each group for its heads."""
    return x.float().permute(1, 2, 0, 3).repeat_interleave(heads // x.shape[2], 1)


def over_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[b, heads, s, d] -> [b, groups, s, d], summed over the heads of a group."""
    b, heads, s, d = x.shape
    return x.view(b, groups, heads // groups, s, d).sum(2)


def _scores(query: torch.Tensor, key: torch.Tensor, softmax_scale: float, *, causal: bool) -> torch.Tensor:
    """Scores [b, heads, s, keys] FP32."""
    return masked(by_head(query, query.shape[2]) @ by_head(key, query.shape[2]).transpose(2, 3) * softmax_scale, causal)


def masked(scores: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return scores [.., s, keys], with a causal mask -inf where a key is later than its query."""
    if not causal:
        return scores
    s = scores.shape[-1]
    return scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1), float("-inf"))
