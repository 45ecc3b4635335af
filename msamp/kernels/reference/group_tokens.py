"""Sort the tokens of a mixture of experts by expert, on the device."""

import torch


def row_capacity(tokens: int, count: int, alignment: int) -> int:
    """Return the rows of a buffer in which any load of `tokens` rows fits, each expert's rows padded to a multiple of `alignment`."""
    return (tokens // alignment + min(count, tokens)) * alignment


def group_tokens(experts: torch.Tensor, count: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assign every (token, expert) pair a row, such that the rows of an expert are adjacent and in the order of the tokens.

    It never waits for the device: shapes depend on shapes only, so that the buffer has room for any load.

    Args:
        experts: integers [tokens, top-k] below `count`, the experts of each token; a negative one is an expert of another rank, whose
            pair gets no row.
        count: number of experts.
        alignment: each expert's rows are padded to a multiple of it, `grouped_mm.GROUP_ALIGNMENT` for our weight gradients.

    Returns:
        offsets: int32 [count], the end of each expert's rows with their padding, as `grouped_mm` takes them.
        source: int32 [`row_capacity`], the pair of each row, token * top-k + choice; -1 for padding and for rows after the last expert's.
        places: int32 [tokens, top-k], the row of each pair; -1 for an expert of another rank.
    """
    if experts.ndim != 2 or experts.is_floating_point() or experts.dtype == torch.bool:
        raise ValueError(f"experts are {experts.dtype} {tuple(experts.shape)}; they must be integers [tokens, top-k]")
    tokens, top_k = experts.shape
    device = experts.device
    keys = experts.reshape(-1).to(torch.int64).clamp(-1, count)
    keys = keys.to(torch.int16 if count < 2**15 else torch.int32)  # a GPU sorts byte by byte
    by_expert, order = keys.sort(stable=True)
    numbers = torch.arange(-1, count, dtype=keys.dtype, device=device)
    ends = torch.searchsorted(by_expert, numbers, right=True)  # the first one: of the pairs without a row
    sizes = torch.diff(ends)
    offsets = ((sizes + alignment - 1) // alignment * alignment).cumsum(0)
    shift = torch.cat([offsets.new_zeros(1), offsets[:-1]]) - ends[:-1]  # from a pair's place in the order to its row
    capacity = row_capacity(tokens * top_k, count, alignment)
    here = by_expert >= 0
    rows = torch.where(here, torch.arange(by_expert.numel(), device=device) + shift[by_expert.clamp(min=0).int()], capacity)
    source = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)  # the last entry takes the pairs without a row
    source.index_copy_(0, rows, order.to(torch.int32))
    places = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    places.index_copy_(0, order, torch.where(here, rows, -1).to(torch.int32))
    return offsets.to(torch.int32), source[:capacity], places.view(tokens, top_k)
