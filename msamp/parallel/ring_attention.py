"""Ring attention: attention over sequences that are split between ranks (context parallelism).

Each of N ranks has the queries, keys and values of two of 2 N equal chunks of every sequence: rank r has chunks r and 2 N - 1 - r
("zigzag"), so that with a causal mask all ranks have the same work. Keys and values travel around the ring, one rank per step. While a rank
computes with the ones it has, the next ones arrive:

    step 0      own keys           queries of both chunks, causal
    source < r  an earlier rank's  queries of both chunks over the keys of the first chunk; the second is in the future
    source > r  a later rank's     queries of the second chunk over the keys of both chunks; the first is in the past

A step's output o and the logarithm l of the sum of each row's exponentials are merged with the results of the steps before it (FP32):

    o <- o + sigmoid(l' - l) (o' - o)        l <- log(exp(l) + exp(l'))

Backward goes around once more. From the merged output and the merged l each step computes its part of the gradients; dQ stays, and dK and
dV follow the keys and values one step behind them, until they are back at their own rank.

Without a causal mask all queries attend to all keys in each step.

With the wire "fp8", keys and values travel in E4M3, a byte per element, in forward and in backward. Each rank casts its own keys and its
own values, with one just-in-time scale each, which travel with them, so no rank rounds again what it passes on. A rank that receives them
computes with the dequantized values; with its own keys and values it computes unrounded. The gradients travel in the compute dtype.

Source: Ring Attention (arXiv:2310.01889); the zigzag order is the same as in megatron-core's `get_batch_on_this_cp_rank`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from msamp.comm.collectives import Peers, Pending
from msamp.kernels import attention_part as kernels
from msamp.kernels import ops
from msamp.kernels.attention_part import attention_part, attention_part_backward
from msamp.nn.differentiable_once import differentiable_once
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import dequantize

KIND = "activation"
COMPUTE, FP8 = "bf16", "fp8"
WIRES = (COMPUTE, FP8)
Held = TypeVar("Held")


class Step(NamedTuple):
    """What a rank computes with the keys and values of one rank: the queries and keys that take part, as slices of the sequence dimension,
    and whether the mask is causal (otherwise there is none)."""

    queries: slice
    keys: slice
    causal: bool


WHOLE = slice(None)


def step_of(rank: int, source: int, length: int, *, causal: bool) -> Step:
    """Return what `rank` computes with the keys and values of rank `source`, of `length` tokens each, an even number."""
    if not causal or source == rank:
        return Step(WHOLE, WHOLE, causal)
    half = length // 2
    return Step(WHOLE, slice(0, half), False) if source < rank else Step(slice(half, None), WHOLE, False)


def steps_of(peers: Peers, length: int, *, causal: bool) -> Iterator[Step]:
    """Return what this rank computes in each step, with `length` tokens: first with its own keys, then with the keys of the rank before it,
    and so on.

    Raises:
        ValueError: if `length` is odd and there is a causal mask.
    """
    if causal and length % 2:
        raise ValueError(f"ring attention got {length} tokens per rank; two chunks of equal size require an even number")
    return (step_of(peers.rank, (peers.rank - number) % peers.ranks, length, causal=causal) for number in range(peers.ranks))


def pack_codes(first: torch.Tensor, second: torch.Tensor, scale_invs: torch.Tensor) -> torch.Tensor:
    """Return two FP8 tensors and their scale_invs, FP32 [2], as what travels: one flat tensor of bytes."""
    return torch.cat([x.reshape(-1).view(torch.uint8) for x in (first, second, scale_invs)])


def unpack_codes(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what was given to `pack_codes`: two tensors of `shape` in the FP8 `dtype`, and their scale_invs."""
    size = shape.numel()
    first, second = (part.view(dtype).view(shape) for part in packed[: 2 * size].split(size))
    # A copy: the bytes before may have moved the scales out of FP32's alignment.
    return first, second, packed[2 * size :].clone().view(torch.float32)


class RingAttention(NamedTuple):
    """Attention over the sequences of a group of ranks.

    Attributes:
        peers: the ranks, in the order of their chunks.
        softmax_scale: factor of the scores.
        causal: whether a token attends only to itself and earlier tokens.
        backend: kernels, as `msamp.kernels.attention_part.choose` takes them.
        wire: format in which keys and values travel: one of `WIRES`, of which "bf16" is their own dtype.
    """

    peers: Peers
    softmax_scale: float
    causal: bool
    backend: str = "auto"
    wire: str = COMPUTE

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Differentiable attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d], s tokens per rank.

        Raises:
            ValueError: if shapes do not match, s is odd with a causal mask, or no kernel supports the tensors.
        """
        return _Ring.apply(query, key, value, self)

    def steps(self, length: int) -> Iterator[Step]:
        """Return `steps_of` this rank."""
        return steps_of(self.peers, length, causal=self.causal)

    def kernel(self, query: torch.Tensor, key: torch.Tensor) -> str:
        """Return the kernel of all steps."""
        return kernels.choose(self.backend, query, key, causal=self.causal)

    def travelling(self, key: torch.Tensor, value: torch.Tensor) -> "Travelling[tuple[torch.Tensor, torch.Tensor]]":
        """Send keys and values around the ring."""
        return Travelling(self.peers, (key, value), lambda: self.pack(key, value), lambda packed: self.unpack(packed, key))

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return what travels of key and value [s, b, groups, d]: both in one tensor of their dtype, [2, s, b, groups, d]; as "fp8" their
        codes and two FP32 scale_inv in one flat tensor of bytes."""
        if self.wire == COMPUTE:
            return torch.stack([key, value])
        casts = [ops.cast_transpose(x.reshape(-1, x.shape[3]), None, None, E4M3.dtype, row=True) for x in (key, value)]
        return pack_codes(casts[0][0], casts[1][0], torch.stack([scale_inv for _, _, scale_inv, _ in casts]))

    def unpack(self, packed: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value of `pack`, in shape and dtype of `like`."""
        if self.wire == COMPUTE:
            return packed[0], packed[1]
        *codes, scale_invs = unpack_codes(packed, like.shape, E4M3.dtype)
        key, value = (dequantize(part, scale_invs[n], like.dtype) for n, part in enumerate(codes))
        return key, value

    def accumulator(self, like: torch.Tensor) -> torch.dtype:
        """Return the dtype in which parts are summed: the sum of two is rounded once in either."""
        return torch.float32 if self.peers.ranks > 2 else like.dtype


class Merged:
    """The merged output of the steps so far.

    Attributes:
        o: [s, b, heads, d].
        lse: FP32 [b, heads, s].
    """

    def __init__(self, o: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> None:
        self.o, self.lse = o.to(dtype), lse

    def add(self, o: torch.Tensor, lse: torch.Tensor, queries: slice) -> None:
        """Merge the output of a step for some of the queries."""
        before, own = self.lse[:, :, queries], self.o[queries]
        share = torch.sigmoid(lse - before).permute(2, 0, 1)[..., None]
        own.copy_(torch.lerp(own.float(), o.float(), share))
        before.copy_(torch.logaddexp(before, lse))


class _Ring(torch.autograd.Function):
    """(query, key, value, RingAttention) -> output in the query's dtype."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: RingAttention
    ) -> torch.Tensor:
        kernel, travelling = ring.kernel(query, key), ring.travelling(key, value)
        merged: Merged | None = None
        for step in ring.steps(query.shape[0]):
            k, v = travelling.next()
            o, lse = attention_part(query[step.queries], k[step.keys], v[step.keys], ring.softmax_scale, causal=step.causal, kernel=kernel)
            if merged is None:
                merged = Merged(o, lse, ring.accumulator(query))
            else:
                merged.add(o, lse, step.queries)
        assert merged is not None
        o = merged.o.to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, o, merged.lse)
        ctx.ring = ring
        return o.flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, o, lse = ctx.saved_tensors
        ring, grad_o = ctx.ring, grad_o.view(o.shape)
        kernel, travelling = ring.kernel(query, key), ring.travelling(key, value)
        dq = own = None
        behind: Pending | None = None
        for step in ring.steps(query.shape[0]):
            k, v = travelling.next()
            parts = (grad_o[step.queries], query[step.queries], k[step.keys], v[step.keys], o[step.queries], lse[:, :, step.queries])
            dq_part, dk, dv = attention_part_backward(*parts, ring.softmax_scale, causal=step.causal, kernel=kernel)
            if dq is None:
                dq, own = dq_part.to(ring.accumulator(query)), torch.stack([dk, dv])
                continue
            assert own is not None
            dq[step.queries] += dq_part
            gradients = torch.zeros_like(own) if behind is None else behind.wait()
            gradients[0, step.keys] += dk
            gradients[1, step.keys] += dv
            behind = ring.peers.start_ring(gradients, "gradients of keys and values", KIND, "grad of keys and values ring")
        assert dq is not None
        assert own is not None
        if behind is not None:
            own += behind.wait()
        return dq.to(query.dtype), own[0], own[1], None


class Travelling(Generic[Held]):
    """Keys and values on their way around the ring.

    Args:
        peers: the ranks.
        own: keys and values of this rank, in any form.
        pack: returns what travels of them; called if there are other ranks.
        unpack: returns keys and values from what has arrived.
    """

    def __init__(self, peers: Peers, own: Held, pack: Callable[[], torch.Tensor], unpack: Callable[[torch.Tensor], Held]) -> None:
        self._peers, self._here, self._unpack, self._left = peers, own, unpack, peers.ranks - 1
        self._packed = pack() if self._left else None
        self._pending: Pending | None = None

    def next(self) -> Held:
        """Return the keys and values of the next step, and start to receive the following step's."""
        if self._pending is not None:
            self._packed = self._pending.wait()
            self._here = self._unpack(self._packed)
        self._pending = None
        if self._left:
            assert self._packed is not None
            self._pending = self._peers.start_ring(self._packed, "keys and values", KIND, "keys and values ring")
            self._left -= 1
        return self._here
