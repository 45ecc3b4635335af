"""Rows of a mixture of experts: copy the rows of tokens to their experts, and add up the rows of a token."""

import torch


def permute(
    x: torch.Tensor, source: torch.Tensor, top_k: int, *, row: bool = False, col: bool = False, end: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the FP8 rows of tokens to the rows of their experts, in one or both layouts. A cast before this copy reads each token once and
    moves one byte per element, where a cast behind it would read BF16 top-k times.

    Args:
        x: [tokens, N] FP8.
        source: int32 [R], as `group_tokens` returns it.
        top_k: pairs per token.
        row: return the rows.
        col: return their transpose.
        end: int32 [1], on the device: rows from this number on have no pair, and are undefined in the results; a kernel leaves them out.
            None: all rows are computed.

    Returns:
        [R, N] and [N, R] of the dtype of `x`, with zeros where `source` is -1. What is not requested is empty.
    """
    codes = x.view(torch.uint8)[(source.clamp(min=0) // top_k).long()].masked_fill_((source < 0).unsqueeze(1), 0).view(x.dtype)
    nothing = x.new_empty(0)
    return codes if row else nothing, codes.view(torch.uint8).t().contiguous().view(x.dtype) if col else nothing


def unpermute(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add up the rows of each token in FP32, in the order of its choices, and round once.

    Args:
        y: [R, N] BF16, FP16 or FP32.
        places: int32 [tokens, top-k], as `group_tokens` returns it; -1 adds nothing.

    Returns:
        [tokens, N] of the dtype of `y`.
    """
    total = torch.zeros((places.shape[0], y.shape[1]), dtype=torch.float32, device=y.device)
    for choice in places.long().unbind(1):
        total += y[choice.clamp(min=0)].float().masked_fill_((choice < 0).unsqueeze(1), 0.0)
    return total.to(y.dtype)
