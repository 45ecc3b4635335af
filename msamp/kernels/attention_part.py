"""Attention over a part of the keys with torch's own kernels, forward and backward, which return and read the statistics of its rows.

`scaled_dot_product_attention` does not return the logarithm of the sum of each row's exponentials, but the operators below it do, and their
backwards read it. cuDNN is the faster of the two on Hopper (`tools/bench/LOG.md`). Without either, the reference twin computes in FP32 with
a matrix of all scores.
"""

import torch
from torch import Tensor

from msamp.kernels.reference import attention_part as twin
from msamp.kernels.reference.attention_part import check_parts

CUDNN, FLASH, MATH = "cudnn", "flash", "math"
aten = torch.ops.aten


def choose(backend: str, query: Tensor, key: Tensor, *, causal: bool) -> str:
    """Return the kernel for a part: `CUDNN`, `FLASH` or `MATH`.

    Args:
        backend: one of the three, or "auto", the first that supports the tensors. A CPU always computes by `MATH`.
        query, key: [s, b, heads, d] and [keys, b, groups, d].
        causal: as for `attention_part`.

    Raises:
        ValueError: if the GPU does not support these tensors with the given backend.
    """
    if not query.is_cuda or backend == MATH:
        return MATH
    wide = query.shape[3] % 8 == 0  # torch pads narrower heads before it calls these operators
    settings = torch.backends.cuda.SDPAParams(
        _by_head(query), _by_head(key), _by_head(key), None, 0.0, causal, query.shape[2] != key.shape[2]
    )
    possible = {
        CUDNN: wide and torch.backends.cuda.can_use_cudnn_attention(settings),
        FLASH: wide and torch.backends.cuda.can_use_flash_attention(settings),
    }
    if backend in possible and not possible[backend]:
        raise ValueError(
            f"the {backend} kernel does not support attention of {tuple(query.shape)} over {tuple(key.shape)} in {query.dtype}: choose auto"
        )
    if backend in possible:
        return backend
    return next((name for name, usable in possible.items() if usable), MATH)


def attention_part(query, key, value, softmax_scale, *, causal, kernel=MATH):
    """See `msamp.kernels.reference.attention_part`, which is `MATH`; `kernel` is the result of `choose`."""
    if kernel == MATH:
        return twin.attention_part(query, key, value, softmax_scale, causal=causal)
    check_parts(query, key, value, causal=causal)
    parts = tuple(map(_by_head, (query, key, value)))
    if kernel == CUDNN:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, causal, False, scale=softmax_scale)
    else:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(*parts, 0.0, causal, False, scale=softmax_scale)
    return _by_token(o), lse.view(lse.shape[:3])


def attention_part_backward(grad_o, query, key, value, o, lse, softmax_scale, *, causal, kernel=MATH):
    """See `msamp.kernels.reference.attention_part`, which is `MATH`; `kernel` is the result of `choose`."""
    if kernel == MATH:
        return twin.attention_part_backward(grad_o, query, key, value, o, lse, softmax_scale, causal=causal)
    check_parts(query, key, value, causal=causal)
    parts, lse = [_by_head(x) for x in (grad_o, query, key, value, o)], lse.contiguous()
    seed = lse.new_zeros(2, dtype=torch.int64)  # of dropout, which both require and do not read without dropout
    lengths = query.shape[0], key.shape[0]
    if kernel == CUDNN:
        backward = aten._scaled_dot_product_cudnn_attention_backward
        others = [lse[..., None], seed, seed, None, None, None, *lengths, 0.0, causal]
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        others = [lse, None, None, *lengths, 0.0, causal, seed, seed]
    return tuple(map(_by_token, backward(*parts, *others, scale=softmax_scale)))


def _by_head(x: Tensor) -> Tensor:
    """[s, b, n, d] -> a view [b, n, s, d]: the kernels read any strides of the first three dimensions."""
    return x.permute(1, 2, 0, 3)


def _by_token(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)
