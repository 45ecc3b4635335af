"""Attention over sequences that are split between ranks by an all-to-all of heads: each rank computes some heads of whole sequences.

Before attention each of N ranks sends every other rank that rank's share of the heads of its tokens, so that a rank has 1 / N of the heads
of all tokens. Any attention of one process then computes them, and a second all-to-all brings each output back to the rank of its token:

    query, key, value  [s / N, b, heads, d]  -> [s, b, heads / N, d]    tokens in the order of the sequence
    output             [s, b, heads / N, d]  -> [s / N, b, heads, d]    tokens of this rank

Backward runs the same two in the opposite order. A rank's tokens are two of 2 N equal chunks, r and 2 N - 1 - r ("zigzag",
`msamp.parallel.ring_attention`).

Compared with the ring, the kernels run once, over whole sequences; the bytes are those of queries, keys, values and output, each sent once,
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
        (s, _, heads, d), groups, ranks = query.shape, key.shape[2], self.peers.ranks
        if heads % ranks or groups % ranks:
            raise ValueError(f"{heads} heads in {groups} groups cannot be divided between {ranks} ranks: choose a divisor of both")
        if s % 2:
            raise ValueError(f"an all-to-all of heads got {s} tokens per rank; two chunks of equal size require an even number")
        o = self.attention(*_ToHeads.apply(self, query, key, value))
        return _ToTokens.apply(o.view(*o.shape[:2], heads // ranks, d), self.peers)  # type: ignore[no-any-return]

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange [s, b, n, d] each for this rank's heads of all tokens, [ranks * s, b, n / ranks, d], in their dtype."""
        if self.wire == COMPUTE:
            return to_heads(self.peers, tensors)
        casts = [ops.cast_transpose(x.reshape(-1, x.shape[3]), None, None, E4M3.dtype, row=True) for x in tensors]
        codes = [payload.view(x.shape) for (payload, *_), x in zip(casts, tensors, strict=True)]
        scale_invs = torch.stack([scale_inv for _, _, scale_inv, _ in casts])
        rows = [_by_rank(x, self.peers.ranks) for x in codes] + [scale_invs.view(torch.uint8).expand(self.peers.ranks, -1)]
        *parts, scales = _exchange(self.peers, rows)
        of_rank = scales.contiguous().view(torch.float32)  # [ranks, tensors]
        made = []
        for n, (part, x) in enumerate(zip(parts, tensors, strict=True)):
            payload = part.reshape(self.peers.ranks, *_own_heads(x, self.peers.ranks)).view(E4M3.dtype)
            made.append(_whole(dequantize(payload, of_rank[:, n, None, None, None, None], x.dtype)))
        return tuple(made)


def to_heads(peers: Peers, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Exchange [s, b, n, d] each, of one dtype, for this rank's heads of all tokens, [ranks * s, b, n / ranks, d]."""
    parts = _exchange(peers, [_by_rank(x, peers.ranks) for x in tensors])
    shapes = [(peers.ranks, *_own_heads(x, peers.ranks)) for x in tensors]
    return tuple(_whole(part.contiguous().view(x.dtype).view(shape)) for part, x, shape in zip(parts, tensors, shapes, strict=True))


def to_tokens(peers: Peers, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The opposite of `to_heads`: [ranks * s, b, n / ranks, d] each -> all heads of this rank's tokens, [s, b, n, d]."""
    ranks = peers.ranks
    parts = _exchange(peers, [_zigzag(x, ranks).reshape(ranks, -1).view(torch.uint8) for x in tensors])
    made = []
    for part, x in zip(parts, tensors, strict=True):
        s, b, n, d = x.shape
        heads = part.contiguous().view(x.dtype).view(ranks, s // ranks, b, n, d)
        made.append(heads.permute(1, 2, 0, 3, 4).reshape(s // ranks, b, ranks * n, d))
    return tuple(made)


def _exchange(peers: Peers, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Send row r of each tensor of bytes [ranks, n] to rank r, in one all-to-all; return what the ranks sent, in the same shapes."""
    packed = torch.cat(list(rows), 1)
    sizes = [packed.shape[1]] * peers.ranks
    pending = peers.start_all_to_all(packed.view(-1), sizes, "heads of attention", KIND, LABEL, async_op=False)
    return pending.wait().view(packed.shape).split([x.shape[1] for x in rows], 1)


def _own_heads(x: torch.Tensor, ranks: int) -> tuple[int, int, int, int]:
    s, b, n, d = x.shape
    return s, b, n // ranks, d


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[s, b, n, d] -> the bytes of each rank's heads, [ranks, bytes]."""
    s, b, n, d = x.shape
    return x.reshape(s, b, ranks, n // ranks, d).permute(2, 0, 1, 3, 4).reshape(ranks, -1).view(torch.uint8)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks [ranks, s, ...] -> whole sequences [ranks * s, ...]."""
    ranks, s = parts.shape[:2]
    chunks = parts.view(ranks, 2, s // 2, *parts.shape[2:])
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def _zigzag(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """Whole sequences [ranks * s, ...] -> the tokens of each rank, [ranks, s, ...]."""
    chunks = whole.view(2, ranks, -1, *whole.shape[1:])
    return torch.stack([chunks[0], chunks[1].flip(0)], 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    """(HeadExchange, query, key, value) -> this rank's heads of them; the gradients travel in their dtype."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.peers = exchange.peers
        return exchange.to_heads(*tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, *to_tokens(ctx.peers, gradients)


class _ToTokens(torch.autograd.Function):
    """(output of this rank's heads [s, b, heads / ranks, d], ranks) -> output of this rank's tokens [s / ranks, b, heads * d]."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, peers: Peers) -> torch.Tensor:  # type: ignore[override]
        ctx.peers, ctx.heads = peers, o.shape[2] * peers.ranks
        return to_tokens(peers, [o])[0].flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return to_heads(ctx.peers, [grad_o.view(*grad_o.shape[:2], ctx.heads, -1)])[0], None
