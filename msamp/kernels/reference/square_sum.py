"""Sum of squares as integers."""

import torch


def square_sum(x: torch.Tensor, factor: torch.Tensor, units: float) -> torch.Tensor:
    """Sum of the squares of `x * factor`, in 1 / `units`, exact to add up in any order and any cut.

    Each square is taken in FP64 and rounded to whole units, and what that leaves to 2^-30 units.

    Args:
        x: any shape; FP32, BF16, FP16 or an FP8 payload.
        factor: FP64 0-dim; |x * factor| must stay below 4.
        units: a power of two, at most 2^46: the squares must stay below 2^51 units.

    Returns:
        int64 [2]: whole units, and 2^-30 units. Meaningless where `x` holds values that are not finite.
    """
    squares = (x.float().double() * factor).square_().mul_(units)
    whole = squares.round()
    rest = squares.sub_(whole).mul_(2.0**30).round_()
    return torch.stack([whole.to(torch.int64).sum(), rest.to(torch.int64).sum()])
