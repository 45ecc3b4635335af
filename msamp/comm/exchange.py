"""The ways to send gradients (FP8-LM section 2.1): the payload, the rank that adds it up, and the arithmetic of the sum.

An `Exchange` is one such way, chosen by name. It states what other code has to know: which gradient scalings its sum takes, whether that
sum can overflow, and whether some rank has the sum in FP32 to measure the result against. Nothing else asks for its name. Two are built in:

- "fp32-sum", the default: scaled payloads travel to the owner of their rows (all-to-all), which adds them up in FP32 and rounds once.
- "nccl", the paper's: scaled payloads are summed in their own format. Each hop rounds, and the sum can saturate, so that it takes a
  gradient scaling which makes room for it (`msamp.comm.grad_scaling`).

A third enters by `register(Exchange(...))`. Its work is done by a `Wire`, one for each gradient format, with the seam `pack` and
`reduce`: `factor` is what multiplies a gradient into its payload, so that the average over N ranks is the sum of the payloads
divided by `factor * N`, whatever the scaling. The wire chooses the format of the payloads. The averages are in the format of the bucket,
which the optimizer expects. Gradients of formats without scales (FP32, BF16) travel by `PlainWire` with every exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.grad_scaling import GRAD_SCALINGS, POST, GradScaling, check_grad_scaling
from msamp.kernels import ops
from msamp.numerics.formats import Format
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax


@dataclass(frozen=True)
class Reduced:
    """The averaged gradients of a bucket.

    Attributes:
        own: flat payload of this rank's slice, in the format of the bucket.
        flat: the whole bucket's, where every rank has got it already, else None.
        scale_inv: FP32 [parameters]: of the payload; None for a format without scales. Only valid where this rank has
            the payload.
        before: flat, like `own`: reference values against which underflow is counted. The FP32 mean times `factor` where the exchange
            sums in FP32, else this rank's own payload.
        tallies: int64 [segments, 3], what packing measured of `own` (`Bucket.tallies`), where `own` is what was packed: on one rank. With
            them the gradients' norm needs no further read. None where nothing was measured.
    """

    own: torch.Tensor
    flat: torch.Tensor | None
    scale_inv: torch.Tensor | None
    before: torch.Tensor
    tallies: torch.Tensor | None = None


class Wire(Protocol):
    """How an exchange sends the gradients of one format.

    Attributes:
        format: of the payloads. Where it is scaled, gradients are scaled to fill it, else their shared scale is 1.
    """

    format: Format

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        """The flat payload of a bucket's gradients, contiguous and one a parameter; `factor` FP32 [parameters]."""

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Average the packed bucket over the ranks; `factor` FP32 [parameters], `shard`: only the owner needs the result.

        Every rank calls it for the same buckets in the same order, and also where it owns nothing of the bucket. On a GPU it runs on a
        stream of its own and may be captured into a CUDA graph, so it must not wait for the device. `flat` is used up.
        """


class PlainWire:
    """FP32 or BF16 payloads, summed by their owner in FP32 and rounded once."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return bucket.flatten(gradients, self.format)

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, None, flat)
        return self.store(bucket, self.mean(bucket, flat, peers), factor, peers, shard)

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        """See `msamp.comm.owner_sums.SummingWire`."""
        return sum_in_rank_order(peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}")) / peers.ranks

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """See `msamp.comm.owner_sums.SummingWire`; the factor is 1."""
        own = mean.to(self.format.dtype)
        return Reduced(own, None, None, own)


class FP32SumWire:
    """Scaled payloads, dequantised and summed in FP32 by their owner, rounded once with a scale of the sum's own amax.

    The sum does not overflow, and its error is that of one rounding a rank and one of the sum: 2 to 70 times less than
    NCCL's, at the same bytes.
    """

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return bucket.flatten(gradients, self.format, factor)

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, inverse(factor), flat, bucket.tallies(flat))
        return self.store(bucket, self.mean(bucket, flat, peers), factor, peers, shard)

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        """See `msamp.comm.owner_sums.SummingWire`."""
        # The factor is a power of two: it goes in and out without rounding, and only 1 / N may round.
        return sum_in_rank_order(peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}")).div_(peers.ranks)

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """See `msamp.comm.owner_sums.SummingWire`."""
        parts = list(mean.split([segment.elements for segment in bucket.owned]))
        amax = torch.zeros_like(factor)
        places = bucket.sum_tables.send("owned", [segment.index for segment in bucket.owned])
        if parts:
            amax.scatter_reduce_(0, places, ops.grad_stats(bucket.sum_tables, parts, squares=False)[0][0], "amax").div_(factor)
        if bucket.cut or not shard:  # one scale for all pieces of a tensor, and for all ranks that will hold it
            peers.all_reduce(amax, dist.ReduceOp.MAX, f"the amax of the gradients of {bucket}")
        scale = scale_from_amax(amax, self.format.max)
        own = torch.empty_like(mean, dtype=self.format.dtype)
        spans = [(i, 0, segment.elements, segment.start - bucket.own.start) for i, segment in enumerate(bucket.owned)]
        ops.pack(bucket.sum_tables, parts, spans, own, (scale / factor)[places])
        return Reduced(own, None, inverse(scale), mean)


class NCCLWire(FP32SumWire):
    """Scaled payloads summed in their own format as in the paper: each hop rounds, and the sum saturates silently.

    Over NCCL this is NCCL's sum. Over any other backend the payloads travel as bytes and their owner adds them one after
    the other in rank order, rounding each time: the same arithmetic, in one of the orders in which NCCL may do it.
    """

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        scale_inv = inverse(factor) / peers.ranks  # factor * N would leave FP32 for gradients near the end of its range
        if peers.ranks == 1:
            return Reduced(flat, flat, scale_inv, flat, bucket.tallies(flat))
        what, before = f"the gradients of {bucket}", flat[bucket.own]
        if not peers.nccl:
            return Reduced(self._sum(peers.all_to_all(flat, bucket.sizes, what)), None, scale_inv, before)
        if shard:
            return Reduced(self._saturate(peers.reduce_scatter(flat, bucket.sizes, what)), None, scale_inv, before)
        before = before.clone()
        peers.all_reduce(flat, dist.ReduceOp.SUM, what)
        self._saturate(flat)
        return Reduced(flat[bucket.own], flat, scale_inv, before)

    def _saturate(self, total: torch.Tensor) -> torch.Tensor:
        # NCCL's FP8 sum saturates by itself; its FP16 sum becomes infinite (H200, NCCL 2.28), which would reach the weights.
        return total.clamp_(-self.format.max, self.format.max) if self.format.bytes > 1 else total

    def _sum(self, received: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        total = received[0]
        for payload in received[1:]:
            total = quantize(total.float() + payload.float(), 1.0, self.format)
        return total


def pack_scaled(g: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`cast(g * factor)`, contiguous, in the shape of `g`."""
    if fmt.bytes > 1 or g.numel() == 0:
        return quantize(g, factor, fmt).contiguous()
    rows = g.reshape(g.shape[0], -1) if g.dim() > 1 else g.reshape(1, -1)
    return ops.cast(rows, factor, fmt.dtype).view(g.shape)


def sum_in_rank_order(payloads: torch.Tensor) -> torch.Tensor:
    """FP32 [n]: the sum of the ranks' payloads [ranks, n] of any format, always in the same order."""
    return ops.sum_payloads(payloads, None, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One way to send gradients.

    Attributes:
        name: what `--grad-exchange` calls it.
        wire: makes the wire for a scaled gradient format; ValueError for one that it does not carry.
        sums_in_fp32: whether the owner of a row has its sum in FP32, as `Reduced.before`: what the reduced payload is measured against.
            Without, the loss of the sum is unknown.
        scalings: names of the gradient scalings that guard the sum against overflow, its default first; none for a sum that cannot
            overflow. "post" is the one that leaves the sum unguarded.

    Raises:
        ValueError: an unknown scaling, or a guard for a sum in FP32, which does not overflow.
    """

    name: str
    wire: Callable[[Format], Wire]
    sums_in_fp32: bool
    scalings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for scaling in self.scalings:
            check_grad_scaling(scaling)
        if self.sums_in_fp32 and self.scalings:
            raise ValueError(
                f"gradient exchange {self.name!r} sums in FP32, which does not overflow, and has scalings {', '.join(self.scalings)} "
                "against overflow; leave out one of the two"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def can_overflow(self) -> bool:
        """Whether a sum of finite gradients can leave the range of its format."""
        return bool(self.scalings)

    def scaling(self, name: str | None = None, mu_rule: str | None = None) -> GradScaling:
        """The gradient scaling of that name; None is this exchange's default, which is POST where the sum needs no room.

        Raises:
            ValueError: a scaling that this exchange does not take, or a rule for mu (not None) where no mu adapts.
        """
        if name is not None:
            check_grad_scaling(name)
            if name not in self.scalings:
                raise ValueError(f"gradient scaling {name!r} {self._misplaced(name)}")
        chosen = GRAD_SCALINGS[name or self.scalings[0]] if self.scalings else POST
        if mu_rule is not None and not chosen.adapts:
            adapting = [scaling.name for scaling in GRAD_SCALINGS.values() if scaling.adapts]
            if any(scaling in self.scalings for scaling in adapting):
                where = f"belongs to gradient scaling {' or '.join(map(repr, adapting))}, not {chosen.name!r}; drop one of the two"
            else:
                where = self._misplaced(*adapting)
            raise ValueError(f"mu rule {mu_rule!r} {where}")
        return chosen

    def _misplaced(self, *scalings: str) -> str:
        has = f"which takes {', '.join(self.scalings)}" if self.scalings else "which cannot overflow"
        others = [other for other in names() if set(scalings) & set(by_name(other).scalings)]
        return f"is not for gradient exchange {self.name!r}, {has}; drop it, or choose exchange {' or '.join(map(repr, others))}"


_EXCHANGES = {
    exchange.name: exchange
    for exchange in (
        Exchange(name="fp32-sum", wire=FP32SumWire, sums_in_fp32=True),
        Exchange(name="nccl", wire=NCCLWire, sums_in_fp32=False, scalings=("auto", "pre", "post")),
    )
}


def register(exchange: Exchange) -> None:
    """Make an exchange known by its name, in this process; every rank does so before it reads flags or builds a synchroniser.

    Raises:
        ValueError: where another exchange has that name.
    """
    if _EXCHANGES.setdefault(exchange.name, exchange) != exchange:
        raise ValueError(f"there is another gradient exchange {exchange.name!r}; choose a name other than {', '.join(names())}")


def by_name(name: str) -> Exchange:
    """The exchange of that name; ValueError for an unknown one, listing those there are."""
    if name not in _EXCHANGES:
        raise ValueError(f"gradient exchange {name!r} is unknown; choose one of {', '.join(names())}")
    return _EXCHANGES[name]


def names() -> tuple[str, ...]:
    """The names of all exchanges, the default first."""
    return tuple(_EXCHANGES)
