"""Attention over sequences that are split between ranks by an all-to-all of heads: each rank computes some heads of whole sequences.

Before attention each of N ranks sends every other rank that rank's share of the heads of its tokens, so that a rank has 1 / N of the heads
of all tokens. Any attention of one process then computes them, and a second all-to-all brings each output back to the rank of its token:

    query, key, value  [s / N, b, heads, d]  -> [s, b, heads / N, d]    tokens in the order of the sequence
    output             [s, b, heads / N, d]  -> [s / N, b, heads, d]    tokens of this rank

Backward runs the same two in the opposite order. A rank's tokens are two of 2 N equal chunks, r and 2 N - 1 - r ("zigzag",
`msamp.parallel.ring_attention`).

Compared with the ring, the kernels run once, over whole sequences; queries, keys, values and output are each sent once,
instead of keys and values sent N - 1 times. But nothing is computed while they travel, and N must divide the number of heads of keys.

With the wire "fp8", queries, keys and values travel in E4M3, a byte per element, with one just-in-time scale per tensor and rank. The rank
that receives them computes with the dequantized values. Output and all gradients travel in the compute dtype.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.nn.differentiable_once import differentiable_once
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import dequantize
from msamp.parallel.ring_attention import COMPUTE, KIND

LABEL = "heads all-to-all"
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class HeadExchange(NamedTuple):
    """Attention whose heads are divided between the ranks that share the sequences.

    Attributes:
        peers: the ranks, in the order of their chunks.
        attention: differentiable attention over whole sequences, query [s, b, heads, d], key and value [s, b, groups, d] ->
            [s, b, heads * d].
        wire: format in which queries, keys and values travel: one of `msamp.parallel.ring_attention.WIRES`, of which "bf16" is their dtype.
    """

    peers: Peers
    attention: Attention
    wire: str = COMPUTE

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Differentiable attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d], s tokens per rank.

        Raises:
            ValueError: if the heads or the groups cannot be divided between the ranks, or s is odd.
        """
        heads = _ToHeads.apply(self, query, key, value)
        o = self.attention(*heads)
        return _ToTokens.apply(o.view(heads[0].shape), self.peers)  # type: ignore[no-any-return]

    def spread(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange [s, b, n, d] each for this rank's heads of all tokens, [ranks * s, b, n / ranks, d], in their dtype. Not differentiable.

        Raises:
            ValueError: as `__call__`.
        """
        tensors = (query, key, value)
        check_divisible(self.peers.ranks, query.shape[0], query.shape[2], key.shape[2])
        if self.wire == COMPUTE:
            return to_heads(self.peers, tensors)[0]
        casts = [ops.cast_transpose(x.reshape(-1, x.shape[3]), None, None, E4M3.dtype, row=True) for x in tensors]
        codes = [payload.view(x.shape) for (payload, *_), x in zip(casts, tensors, strict=True)]
        parts, of_ranks = _heads_by_source(self.peers, codes, torch.stack([scale_inv for _, _, scale_inv, _ in casts]))
        scale_invs = of_ranks.t()[..., None, None, None, None]  # by tensor, [ranks, 1, 1, 1, 1]
        return tuple(
            _whole(dequantize(part.view(E4M3.dtype), scale_inv, x.dtype))
            for part, scale_inv, x in zip(parts, scale_invs, tensors, strict=True)
        )

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`spread` of any one tensor, in its dtype on the wire too."""
        return to_heads(self.peers, [x])[0][0]

    def to_tokens(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The opposite of `to_heads`, in one all-to-all: [ranks * s, b, n / ranks, d] each -> [s, b, n, d]."""
        return to_tokens(self.peers, tensors)[0]


def check_divisible(ranks: int, tokens: int, heads: int, groups: int) -> None:
    """Raise a ValueError if heads or groups cannot be divided between the ranks, or a rank's tokens are not two equal chunks."""
    if heads % ranks or groups % ranks:
        raise ValueError(f"{heads} heads in {groups} groups cannot be divided between {ranks} ranks: choose a divisor of both")
    if tokens % 2:
        raise ValueError(f"an all-to-all of heads got {tokens} tokens per rank; two chunks of equal size require an even number")


def to_heads(
    peers: Peers, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None = None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Exchange all heads of this rank's tokens for this rank's heads of all tokens, in one all-to-all.

    Args:
        peers: the ranks.
        tensors: [s, b, n, d] each, of one dtype, or all in FP8.
        scalars: FP32 [k], which travel to every rank; None sends none.

    Returns:
        The tensors [ranks * s, b, n / ranks, d], and the scalars of all ranks, FP32 [ranks, k].
    """
    parts, of_ranks = _heads_by_source(peers, tensors, scalars)
    return tuple(_whole(part).view(x.dtype) for part, x in zip(parts, tensors, strict=True)), of_ranks


def to_tokens(
    peers: Peers, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None = None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The opposite of `to_heads`: [ranks * s, b, n / ranks, d] each -> all heads of this rank's tokens, [s, b, n, d]."""
    chunks = [_words(x).unflatten(0, (2, peers.ranks, -1)) for x in tensors]
    parts, of_ranks = _exchange(peers, [(early, late.flip(0)) for early, late in chunks], scalars)
    merged = [part.flatten(1, 2).permute(1, 2, 0, 3, 4).flatten(2, 3) for part in parts]
    return tuple(part.view(x.dtype) for part, x in zip(merged, tensors, strict=True)), of_ranks


def _heads_by_source(
    peers: Peers, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`to_heads`, of each rank's tokens apart: [ranks, s, b, n / ranks, d], in words."""
    pieces = [(_words(x).unflatten(2, (peers.ranks, -1)).permute(2, 0, 1, 3, 4),) for x in tensors]
    parts, of_ranks = _exchange(peers, pieces, scalars)
    return [part.flatten(1, 2) for part in parts], of_ranks


def _exchange(
    peers: Peers, tensors: Sequence[Sequence[torch.Tensor]], scalars: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Send row r of each tensor to rank r, in one all-to-all, and the scalars to every rank.

    Args:
        peers: the ranks.
        tensors: each as its pieces [ranks, ..] of one shape and any strides, all of one dtype.
        scalars: as in `to_heads`.

    Returns:
        What the ranks sent: a view [ranks, pieces, ..] of each tensor, and the scalars as `to_heads` returns them.
    """
    ranks, first = peers.ranks, tensors[0][0]
    beside = first.new_empty(0, dtype=torch.float32) if scalars is None else scalars.contiguous()
    sizes = [sum(piece[0].nbytes for piece in pieces) for pieces in tensors] + [beside.nbytes]
    packed = torch.empty(ranks, sum(sizes), dtype=torch.uint8, device=first.device)

    def views(buffer: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        *slots, last = buffer.split(sizes, 1)
        shapes = [(ranks, len(pieces), *pieces[0].shape[1:]) for pieces in tensors]
        return [slot.view(first.dtype).view(shape) for slot, shape in zip(slots, shapes, strict=True)], last

    slots, last = views(packed)
    for slot, pieces in zip(slots, tensors, strict=True):
        for n, piece in enumerate(pieces):
            slot[:, n].copy_(piece)
    last.copy_(beside.view(torch.uint8))
    pending = peers.start_all_to_all(packed.view(-1), [packed.shape[1]] * ranks, "heads of attention", KIND, LABEL, async_op=False)
    arrived, last = views(pending.wait().view(packed.shape))
    return arrived, last.clone().view(torch.float32)  # a copy: the bytes before may have moved them out of FP32's alignment


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return FP8 codes four at a time: copies of single bytes do not use a GPU's bandwidth. Other dtypes as they are."""
    if x.element_size() > 1:
        return x
    return x.contiguous().view(torch.uint8 if x.shape[-1] % 4 else torch.int32)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks [ranks, s, ...] -> whole sequences [ranks * s, ...]."""
    chunks = parts.unflatten(1, (2, -1))
    return torch.cat([*chunks[:, 0], *reversed(chunks[:, 1])])


class _ToHeads(torch.autograd.Function):
    """(HeadExchange, query, key, value) -> this rank's heads of them, `spread`; the gradients travel in their dtype."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.peers = exchange.peers
        return exchange.spread(*tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, *to_tokens(ctx.peers, gradients)[0]


class _ToTokens(torch.autograd.Function):
    """(output of this rank's heads [s, b, heads / ranks, d], ranks) -> output of this rank's tokens [s / ranks, b, heads * d]."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, peers: Peers) -> torch.Tensor:  # type: ignore[override]
        ctx.peers, ctx.heads = peers, o.shape[2] * peers.ranks
        return to_tokens(peers, [o])[0][0].flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return to_heads(ctx.peers, [grad_o.view(*grad_o.shape[:2], ctx.heads, -1)])[0][0], None
