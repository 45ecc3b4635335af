"""Gradient exchanges (FP8-LM section 2.1): the format on the wire, which rank computes the sum, and in which arithmetic.

An `Exchange` has a name and states what other code needs to know: which gradient scalings it supports, whether its sum can overflow, and
whether some rank has the FP32 sum to measure the result against. No other code compares its name. There are two:

- "fp32-sum", the default: scaled payloads are sent to the owner of their rows (all-to-all), which sums them in FP32 and rounds once.
- "nccl", as in the paper: scaled payloads are summed in their own format. Each hop rounds, and the sum can saturate, so it requires a
  gradient scaling that makes headroom (`msamp.comm.grad_scaling`).

`register(Exchange(...))` adds another. A `Wire` does the work, one per gradient format, with two methods, `pack` and `reduce`. `factor` is
the factor from gradients to payloads, so that the average over N ranks is the sum of the payloads divided by `factor * N`, whatever the
scaling. The wire chooses the format of the payloads. The averages have the format of the bucket, which the optimizer expects. Gradients
in formats without scales (FP32, BF16) use `PlainWire` with every exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
        flat: the payload of the whole bucket if every rank already has it, else None.
        scale_inv: FP32 [parameters], of the payload; None for a format without scales. Only valid where this rank has the payload.
        before: flat, like `own`: reference values for counting underflow, this rank's own payload. If the exchange sums in FP32, [rows,
            own elements] instead, of which `reference` computes the mean.
        tallies: int64 [pieces, 3], the counts that packing took of `own` (`GuessedPack.tallies`) if `own` is what was packed: on one rank.
            With them the gradient norm needs no further read. None if there are none.
    """

    own: torch.Tensor
    flat: torch.Tensor | None
    scale_inv: torch.Tensor | None
    before: torch.Tensor
    tallies: torch.Tensor | None = None

    def reference(self) -> torch.Tensor:
        """Return `before`, flat; where it has rows, their FP32 mean, which is `factor` times too large."""
        return self.before if self.before.ndim == 1 else _mean(self.before)


class Wire(Protocol):
    """How an exchange sends the gradients of one format.

    Attributes:
        format: of the payloads. If it is scaled, gradients are scaled to fill its range; else their shared scale is 1.
    """

    format: Format

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        """Return the flat payload of a bucket's gradients, which are contiguous, one per parameter; `factor` FP32 [parameters]."""

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Average the packed bucket over the ranks; `factor` FP32 [parameters]; with `shard` only the owner needs the result.

        Every rank calls it for the same buckets in the same order, even if it owns nothing of a bucket. On a GPU it runs on a separate
        stream and may be captured in a CUDA graph, so it must not wait for the device. It may overwrite `flat`.
        """


@runtime_checkable
class SummingWire(Wire, Protocol):
    """A wire whose `reduce` computes the FP32 mean at the owner and rounds it once; gradient accumulation "owner" calls the two parts."""

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        """Return this rank's slice of the mean of the payloads `flat` over the ranks, FP32 [own elements]."""

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Store the mean, which is `factor` (FP32 [parameters]) times too large, in the format of the bucket."""


class PlainWire:
    """FP32 or BF16 payloads, summed by their owner in FP32 and rounded once. The factor is 1, or the weight of the average
    (`msamp.comm.collectives`), which the payloads then contain."""

    def __init__(self, fmt: Format) -> None:
        self.format = fmt

    def pack(self, bucket: Bucket, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return bucket.packed.pack(gradients, self.format, factor)

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, None, flat)
        return self.store(bucket, self.mean(bucket, flat, peers), factor, peers, shard)

    def mean(self, bucket: Bucket, flat: torch.Tensor, peers: Peers) -> torch.Tensor:
        return _mean(peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}"))

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        own = mean.to(self.format.dtype)
        return Reduced(own, None, None, own)


class FP32SumWire(PlainWire):
    """Scaled payloads that their owner dequantizes and sums in FP32, then rounds once with a scale from the sum's amax.

    The sum cannot overflow. Its error is one rounding per rank and one of the sum: 2 to 70 times less than NCCL's, for the same bytes.
    """

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        if peers.ranks == 1:
            return Reduced(flat, flat, inverse(factor), flat, bucket.packed.tallies(flat))
        return self._round(bucket, peers.all_to_all(flat, bucket.sizes, f"the gradients of {bucket}"), factor, peers, shard)

    def store(self, bucket: Bucket, mean: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        return self._round(bucket, mean.unsqueeze(0), factor, peers, shard)

    def _round(self, bucket: Bucket, payloads: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        """Round the mean over the rows of `payloads` [rows, own elements], `factor` times too large, with a scale from its amax."""
        ranks, rows = len(payloads), [payloads] * len(bucket.params)
        amax = bucket.averaged.measure(rows, self.format, ranks=ranks).div_(factor)
        if bucket.cut or not shard:  # one scale for all pieces of a tensor, and for all ranks that will have it
            peers.all_reduce(amax, dist.ReduceOp.MAX, f"the amax of the gradients of {bucket}")
        scale = scale_from_amax(amax, self.format.max)
        # The factor is a power of two, so multiplying and dividing by it is exact; only 1 / N may round.
        own = bucket.averaged.pack(rows, self.format, scale / factor, ranks=ranks)
        return Reduced(own, None, inverse(scale), payloads)


class NCCLWire(FP32SumWire):
    """Scaled payloads summed in their own format, as in the paper: each hop rounds, and the sum saturates silently.

    Over NCCL this is NCCL's sum. Over any other backend the payloads are sent as bytes, and their owner adds them in rank order and rounds
    each time: the same arithmetic, in one of the orders that NCCL may use.
    """

    def reduce(self, bucket: Bucket, flat: torch.Tensor, factor: torch.Tensor, peers: Peers, shard: bool) -> Reduced:
        scale_inv = inverse(factor) / peers.ranks  # factor * N would leave FP32 for gradients near the end of its range
        if peers.ranks == 1:
            return Reduced(flat, flat, scale_inv, flat, bucket.packed.tallies(flat))
        what, before = f"the gradients of {bucket}", flat[bucket.own]
        if not peers.nccl:
            total, *payloads = peers.all_to_all(flat, bucket.sizes, what)
            for payload in payloads:
                total = quantize(total.float() + payload.float(), 1.0, self.format)
            return Reduced(total, None, scale_inv, before)
        if shard:
            return Reduced(self._saturate(peers.reduce_scatter(flat, bucket.sizes, what)), None, scale_inv, before)
        before = before.clone()
        peers.all_reduce(flat, dist.ReduceOp.SUM, what)
        self._saturate(flat)
        return Reduced(flat[bucket.own], flat, scale_inv, before)

    def _saturate(self, total: torch.Tensor) -> torch.Tensor:
        # NCCL's FP8 sum saturates; its FP16 sum becomes infinite (H200, NCCL 2.28), which would reach the weights.
        return total.clamp_(-self.format.max, self.format.max) if self.format.bytes > 1 else total


def pack_scaled(g: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`cast(g * factor)`, contiguous, in the shape of `g`."""
    if fmt.bytes > 1 or g.numel() == 0:
        return quantize(g, factor, fmt).contiguous()
    rows = g.reshape(g.shape[0], -1) if g.dim() > 1 else g.reshape(1, -1)
    return ops.cast(rows, factor, fmt.dtype).view(g.shape)


def sum_in_rank_order(payloads: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' payloads [ranks, n] of any format in FP32, always in the same order; returns [n]."""
    return ops.sum_payloads(payloads, None, torch.float32)


def _mean(payloads: torch.Tensor) -> torch.Tensor:
    return sum_in_rank_order(payloads).div_(len(payloads))


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One way to send gradients.

    Attributes:
        name: its name in `--grad-exchange`.
        wire: returns the wire for a scaled gradient format; ValueError for a format that it does not support.
        sums_in_fp32: whether the owner of a row has its FP32 sum, as `Reduced.before`, to measure the reduced payload against. Otherwise
            the error of the sum is unknown.
        scalings: names of the supported gradient scalings against overflow, the default first; empty if the sum cannot overflow. "post"
            leaves the sum without headroom.
    """

    name: str
    wire: Callable[[Format], Wire]
    sums_in_fp32: bool
    scalings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def can_overflow(self) -> bool:
        """Whether a sum of finite gradients can leave the range of its format."""
        return bool(self.scalings)

    def scaling(self, name: str | None = None, mu_rule: str | None = None) -> GradScaling:
        """Return the gradient scaling of that name; None is this exchange's default, which is POST if the sum needs no headroom.

        Raises:
            ValueError: a scaling that this exchange does not support, or a mu rule for a scaling without an adaptive mu.
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
    """Register an exchange under its name in this process. Every rank must do so before it parses flags or builds a synchronizer.

    Raises:
        ValueError: if another exchange has that name.
    """
    if _EXCHANGES.setdefault(exchange.name, exchange) != exchange:
        raise ValueError(f"a gradient exchange {exchange.name!r} already exists; choose a name other than {', '.join(names())}")


def by_name(name: str) -> Exchange:
    """Return the exchange of that name; raise a ValueError that lists the known names if there is none."""
    if name not in _EXCHANGES:
        raise ValueError(f"gradient exchange {name!r} is unknown; choose one of {', '.join(names())}")
    return _EXCHANGES[name]


def names() -> tuple[str, ...]:
    """Return the names of all exchanges, the default first."""
    return tuple(_EXCHANGES)
