"""FP8 attention over sequences that are split between ranks: `msamp.nn.fp8_attention` in the ring of `msamp.parallel.ring_attention`.

Each rank casts its own queries, keys and values once. The FP8 kernels read the codes of keys and values as they arrive from the other
ranks, so nothing is rounded twice, and a byte per element travels. Scales are the same on all ranks: delayed ones are reduced over them
when they are rolled, and just-in-time ones follow from the largest amax of all ranks.

    forward    The kernel returns each part's output in E4M3 and the logarithm of its rows' sums. The parts are merged in FP32, and the
               merged output is cast to E4M3. Parts and merged output share the delayed scale of O, which follows from the amax of the
               parts: a mean of them is no larger. Then the first token is merged, as on one process.
    backward   From the merged output and the merged statistics the kernel returns each part's dQ, dK and dV in E5M2. A rank sums dQ of its
               queries in FP32. The codes of dK and dV go straight to the rank that owns the keys, which sums the contributions of all ranks
               in FP32. They are only of keys that the sender's queries attend to: with a causal mask, of three quarters on average.

For a key and its value, a rank sends 5.5 bytes per channel and other rank, on average with a causal mask, where the ring in BF16 sends 12.

The first token's key and value, the values' mean and the mean of their codes are summed over the ranks, and in backward the first token's
gradients: 3, 3 and 2 FP32 values per channel of keys.

The merged output is rounded once more than the output of one process. The gradients are returned in the compute dtype, since to round their
sums to E5M2 again would cost 3 dB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from msamp.comm.collectives import Peers, Pending
from msamp.kernels import ops, scalar_pool
from msamp.nn.fp8_attention import DK, Attended, FP8Attention, Gradients, O, Operands, Prepared, SinkGradients
from msamp.numerics.formats import Format
from msamp.numerics.quantize import dequantize
from msamp.parallel.ring_attention import KIND, Merged, Step, Travelling, pack_codes, step_of, steps_of, unpack_codes


def shapes(length: int, ranks: int, *, causal: bool) -> set[tuple[int, int, bool]]:
    """Return the shapes of the parts that kernels compute, with `length` tokens per rank: queries, keys, whether the mask is causal."""
    shapes = set()
    for rank in range(min(ranks, 3)):
        for source in range(min(ranks, 3)):
            step = _without_first(step_of(rank, source, length, causal=causal), source)
            queries, keys = (len(range(length)[part]) for part in step[:2])
            shapes.add((queries, keys, step.causal))
    return shapes


def _without_first(step: Step, source: int) -> Step:
    """Return the step without the first key of the sequence, which rank 0 has, and without the query that has no other key."""
    if source > 0:
        return step
    return Step(slice(1, None) if step.causal else step.queries, slice(1, step.keys.stop), step.causal)


@dataclass(frozen=True)
class FP8OverRanks(FP8Attention):
    """`FP8Attention` of ranks that share the sequences, the first of which has the first token.

    Attributes:
        peers: the ranks, in the order of their chunks.
    """

    peers: Peers

    @property
    def begins(self) -> bool:
        return self.peers.rank == 0

    def start(self, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._of_all(super().start(key, value, cos, sin), len(key), "first key and value")

    def recentered(self, of: Operands) -> Operands:
        moved = super().recentered(of._replace(sink=torch.zeros_like(of.sink))).sink
        of.sink[2].add_(self._of_all(moved, len(of.value), "mean of values")[2])
        return of

    def first_scales(self, measure: Callable[[], torch.Tensor], fp_max: float) -> torch.Tensor | None:
        """Return just-in-time scales, FP32 [k], from the largest of all ranks' amaxes."""
        return ops.scale_from_amax(self._agree(measure()), fp_max, None, 1.0)

    def _agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        return self.peers.all_reduce(amaxes.clone(), dist.ReduceOp.MAX, "amaxes of attention", KIND, "amaxes all-reduce")

    def _of_all(self, sink: torch.Tensor, tokens: int, what: str) -> torch.Tensor:
        """Return the first token of rank 0 and the mean over the tokens of all ranks but the first, in place."""
        if self.peers.ranks > 1:
            sink[2] *= (tokens - int(self.begins)) / (tokens * self.peers.ranks - 1)
            if not self.begins:
                sink[:2].zero_()
            self.peers.all_reduce(sink, dist.ReduceOp.SUM, what, KIND, "first token all-reduce")
        return sink


@dataclass(frozen=True)
class FP8RingAttention(FP8OverRanks):
    """`FP8Attention` over the sequences of a group of ranks, with the methods of a rank that has whole sequences."""

    def attend(self, of: Operands) -> Attended:
        """Compute the output of this rank's queries over the keys of all ranks.

        Raises:
            ValueError: if the number of tokens is odd with a causal mask.
        """
        travelling, merged, length = self._travelling(of), None, of.query.shape[0]
        for step in self._steps(length):
            part = self.attend_part(_part(of, travelling.next(), step), causal=step.causal)
            o, lse = dequantize(part.o, part.o_scale_inv), part.stats.squeeze(3)
            if merged is None:
                if len(o) < length:  # the first query has no other key
                    o, lse = torch.cat([torch.zeros_like(o[:1]), o]), torch.cat([torch.full_like(lse[..., :1], -torch.inf), lse], 2)
                merged = Merged(o, lse, torch.float32)
            else:
                merged.add(o, lse, step.queries)
        assert merged is not None
        # Until its window is filled, the output has its own scale.
        scaling, scale_inv = self.scaling, scalar_pool.take(merged.o.device)
        scale = scaling.scale[O] if scaling.delayed else None
        flat, dtype = merged.o.view(-1, merged.o.shape[2] * merged.o.shape[3]), scaling.casts[O].format.dtype
        payload, *_ = ops.cast_transpose(flat, scale=scale, amax_slot=None, dtype=dtype, row=True, scale_inv_slot=scale_inv)
        return Attended(payload.view(merged.o.shape), scale_inv, merged.lse[..., None])

    def _steps(self, length: int) -> Iterator[Step]:
        """Return `steps_of` this rank, without the first key of the sequence."""
        steps = enumerate(steps_of(self.peers, length, causal=self.causal))
        return (_without_first(step, (self.peers.rank - number) % self.peers.ranks) for number, step in steps)

    def prepared_gradients(self, of: Operands, prepared: Prepared) -> Gradients:
        """Return the gradients of this rank's operands in FP32."""
        travelling, arriving = self._travelling(of), _Arriving(self, of.key.shape)
        sums = [x.new_zeros(x.shape, dtype=torch.float32) for x in of[:3]]
        for number, step in enumerate(self._steps(of.query.shape[0])):
            rows = prepared.part(step.queries)
            *codes, scale_invs, _ = self.part_gradients(_part(of, travelling.next(), step), rows, causal=step.causal)
            if scale_invs is None:  # sums of several calls of the kernel, which travel in FP8 as one call's do
                casts = [ops.cast_transpose(x.flatten(0, 1).flatten(1), None, None, self._narrow.dtype, row=True) for x in codes[1:]]
                codes[1:] = [cast[0].view(x.shape) for cast, x in zip(casts, codes[1:], strict=True)]
                scale_invs = torch.stack([torch.ones_like(casts[0][2]), *(cast[2] * self._narrow.gain for cast in casts)])
            sums[0][step.queries] += dequantize(codes[0], scale_invs[0])
            if number == 0:
                for own, x, scale_inv in zip(sums[1:], codes[1:], scale_invs[1:], strict=True):
                    own[step.keys] += dequantize(x, scale_inv)
                continue
            arriving.add_to(sums[1:])
            arriving.exchange(number, pack_codes(codes[1], codes[2], scale_invs[1:]))
        arriving.add_to(sums[1:])
        ds, first = prepared.sink
        if self.peers.ranks > 1:
            self.peers.all_reduce(first[1:], dist.ReduceOp.SUM, "gradients of the first key and value", KIND, "first token all-reduce")
        if not self.begins:
            first[1:].zero_()
        dq, dk, dv = SinkGradients(ds, first).add_to(*sums)
        return Gradients(dq, dk, dv, None)

    @property
    def _narrow(self) -> Format:
        return self.scaling.casts[DK].format

    def _travelling(self, of: Operands) -> Travelling[Operands]:
        """Send keys and values around the ring; what arrives has this rank's queries."""

        def unpack(packed: torch.Tensor) -> Operands:
            key, value, scale_invs = unpack_codes(packed, of.key.shape, of.key.dtype)
            return Operands(of.query, key, value, torch.cat([of.scale_invs[:1], scale_invs]), of.sink)

        return Travelling(self.peers, of, lambda: pack_codes(of.key, of.value, of.scale_invs[1:]), unpack)


class _Arriving:
    """Gradients of this rank's keys and values that other ranks compute, one rank per step.

    Args:
        ring: the ranks and the formats.
        shape: of this rank's keys, [s, b, groups, d].
    """

    def __init__(self, ring: FP8RingAttention, shape: torch.Size) -> None:
        self._ring, self._shape = ring, shape
        self._pending: Pending | None = None
        self._keys = slice(None)

    def exchange(self, number: int, packed: torch.Tensor) -> None:
        """Start to send the packed gradients of step `number` to their rank, and to receive another rank's for this rank's keys."""
        peers = self._ring.peers
        other = (peers.rank + number) % peers.ranks  # which has this rank's keys in this step
        self._keys = _without_first(step_of(other, peers.rank, self._shape[0], causal=self._ring.causal), peers.rank).keys
        size = 2 * self._arrived().numel() + 2 * torch.float32.itemsize
        received = packed.new_empty(size)
        what, label = "gradients of keys and values", "grad of keys and values ring"
        self._pending = peers.start_shift(packed, received, -number, what, KIND, label)

    def add_to(self, sums: list[torch.Tensor]) -> None:
        """Wait for gradients that were requested before, and add them to the gradients of keys and values, FP32."""
        if self._pending is None:
            return
        *codes, scale_invs = unpack_codes(self._pending.wait(), self._arrived(), self._ring._narrow.dtype)
        for n, (whole, part) in enumerate(zip(sums, codes, strict=True)):
            whole[self._keys] += dequantize(part, scale_invs[n])
        self._pending = None

    def _arrived(self) -> torch.Size:
        """Return the shape of the gradients that arrive in this step."""
        return torch.Size((len(range(self._shape[0])[self._keys]), *self._shape[1:]))


def _part(of: Operands, here: Operands, step: Step) -> Operands:
    """Return the operands of a step: own queries, and the keys and values that are here."""
    return Operands(of.query[step.queries], here.key[step.keys], here.value[step.keys], here.scale_invs, of.sink)
