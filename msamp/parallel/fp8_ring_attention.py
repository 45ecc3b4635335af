"""FP8 attention over sequences that are split between ranks: `msamp.nn.fp8_attention` in the ring of `msamp.parallel.ring_attention`.

Each rank casts its own queries, keys and values once. The FP8 kernels read the codes of keys and values as they arrive from the other
ranks, so nothing is rounded twice, and a byte per element travels. The casts' two scale_invs travel with them: delayed scales are the same
on all ranks, just-in-time scales are not.

    forward    The kernel returns each part's output in E4M3 and the logarithm of its rows' sums. The parts are merged in FP32, and the
               merged output is cast to E4M3 for the projection. Parts and merged output share the delayed scale of O, which follows from
               the amax of the parts: a mean of them is no larger.
    backward   From the merged output and the merged statistics the kernel returns each part's dQ, dK and dV in E5M2. A rank sums dQ of its
               queries in FP32. The codes of dK and dV go straight to the rank that owns the keys, which sums the contributions of all ranks
               in FP32. They are only of keys that the sender's queries attend to: with a causal mask, of three quarters on average.

For a key and its value, a rank sends 5.5 bytes per channel and other rank, on average with a causal mask, where the ring in BF16 sends 12.

The merged output is rounded once more than the output of one process. The gradients are returned in the compute dtype, since to round their
sums to E5M2 again would cost 3 dB.
"""

from dataclasses import dataclass

import torch

from msamp.comm.collectives import Peers, Pending
from msamp.kernels import ops, scalar_pool
from msamp.nn.fp8_attention import DK, GRAD, Attended, FP8Attention, Gradients, O, Operands
from msamp.numerics.quantize import dequantize
from msamp.parallel.ring_attention import KIND, Merged, Step, Travelling, pack_codes, step_of, steps_of, unpack_codes


def shapes(length: int, ranks: int, *, causal: bool) -> set[tuple[int, int, bool]]:
    """Return the shapes of the parts that kernels compute, with `length` tokens per rank: queries, keys, whether the mask is causal."""
    shapes = set()
    for source in range(ranks):
        step = step_of(min(1, ranks - 1), source, length, causal=causal)
        queries, keys = (len(range(length)[part]) for part in step[:2])
        shapes.add((queries, keys, step.causal))
    return shapes | {(length // 2, length, False)} if causal and ranks > 1 else shapes


@dataclass(frozen=True)
class FP8RingAttention(FP8Attention):
    """`FP8Attention` over the sequences of a group of ranks, with the methods of a rank that has whole sequences.

    Attributes:
        peers: the ranks, in the order of their chunks.
    """

    peers: Peers

    def attend(self, of: Operands) -> Attended:
        """Compute the output of this rank's queries over the keys of all ranks.

        Raises:
            ValueError: if the number of tokens is odd with a causal mask.
        """
        travelling, merged = self._travelling(of), None
        for step in steps_of(self.peers, of.query.shape[0], causal=self.causal):
            part = self.attend_part(_part(of, travelling.next(), step), causal=step.causal)
            o, lse = dequantize(part.o, part.o_scale_inv), part.stats.squeeze(3)
            if merged is None:
                merged = Merged(o, lse, torch.float32)
            else:
                merged.add(o, lse, step.queries)
        assert merged is not None
        return self._cast_output(merged)

    def _cast_output(self, merged: Merged) -> Attended:
        """Cast the merged output to E4M3, until its window is filled with its own scale."""
        scaling, device = self.scaling, merged.o.device
        scale_inv, amax = scalar_pool.take(device), scalar_pool.take(device)
        scale = scaling.scale[O] if scaling.delayed else None
        flat, dtype = merged.o.view(-1, merged.o.shape[2] * merged.o.shape[3]), scaling.casts[O].format.dtype
        payload, *_ = ops.cast_transpose(flat, scale=scale, amax_slot=amax, dtype=dtype, row=True, scale_inv_slot=scale_inv)
        return Attended(payload.view(merged.o.shape), scale_inv, merged.lse[..., None], amax)

    def gradients(self, of: Operands, attended: Attended, grad_o: torch.Tensor) -> Gradients:
        """Return the gradients of this rank's operands in the compute dtype, for the output's gradient [s, b, heads * d]."""
        grad, of_grad = self.cast_one(grad_o.view(attended.o.shape), GRAD)
        travelling, arriving = self._travelling(of), _Arriving(self, of.key.shape)
        sums: list[torch.Tensor] | None = None
        for number, step in enumerate(steps_of(self.peers, of.query.shape[0], causal=self.causal)):
            seen = attended._replace(o=attended.o[step.queries], stats=attended.stats[:, :, step.queries])
            operands = _part(of, travelling.next(), step)
            *codes, scale_invs = self.part_gradients(operands, seen, grad[step.queries], of_grad, causal=step.causal)
            assert scale_invs is not None
            if sums is None:
                sums = [dequantize(x, scale_invs[n]) for n, x in enumerate(codes)]
                continue
            sums[0][step.queries] += dequantize(codes[0], scale_invs[0])
            arriving.add_to(sums[1:])
            arriving.exchange(number, pack_codes(codes[1], codes[2], scale_invs[1:]))
        assert sums is not None
        arriving.add_to(sums[1:])
        dq, dk, dv = (x.to(grad_o.dtype) for x in sums)
        return Gradients(dq, dk, dv, None)

    def _travelling(self, of: Operands) -> Travelling[Operands]:
        """Send keys and values around the ring; what arrives has this rank's queries."""

        def unpack(packed: torch.Tensor) -> Operands:
            key, value, scale_invs = unpack_codes(packed, of.key.shape, of.key.dtype)
            return Operands(of.query, key, value, torch.cat([of.scale_invs[:1], scale_invs]))

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
        self._keys = step_of(other, peers.rank, self._shape[0], causal=self._ring.causal).keys
        size = 2 * self._arrived().numel() + 2 * torch.float32.itemsize
        received = packed.new_empty(size)
        what, label = "gradients of keys and values", "grad of keys and values ring"
        self._pending = peers.start_shift(packed, received, -number, what, KIND, label)

    def add_to(self, sums: list[torch.Tensor]) -> None:
        """Wait for gradients that were requested before, and add them to the gradients of keys and values, FP32."""
        if self._pending is None:
            return
        *codes, scale_invs = unpack_codes(self._pending.wait(), self._arrived(), self._ring.scaling.casts[DK].format.dtype)
        for n, (whole, part) in enumerate(zip(sums, codes, strict=True)):
            whole[self._keys] += dequantize(part, scale_invs[n])
        self._pending = None

    def _arrived(self) -> torch.Size:
        """Return the shape of the gradients that arrive in this step."""
        return torch.Size((len(range(self._shape[0])[self._keys]), *self._shape[1:]))


def _part(of: Operands, here: Operands, step: Step) -> Operands:
    """Return the operands of a step: own queries, and the keys and values that are here."""
    return Operands(of.query[step.queries], here.key[step.keys], here.value[step.keys], here.scale_invs)
