"""Counts of saturation and underflow against a count element by element."""

import pytest
import torch

from msamp.comm.bucket import Bucket
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.exchange import Reduced
from msamp.comm.partition import Piece
from msamp.comm.statistics import NONZERO, SATURATED, SUM_NONZERO, SUM_SATURATED, SUM_VANISHED, VANISHED, Statistics
from msamp.numerics.formats import E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.metrics import judge, saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import quantize

scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
CPU = torch.device("cpu")


def planted(fmt: Format) -> torch.Tensor:
    """3 at the maximum (two beyond it), 2 that vanish, 3 zeros (one negative), 4 in between."""
    top, small = fmt.max, fmt.smallest
    return torch.tensor([top, -2 * top, 1e30, small / 2, -small / 4, 0.0, 0.0, -0.0, 1.0, -1.0, small, top / 2])


def by_hand(values: list[float], payload: list[float], fmt: Format) -> tuple[int, int, int]:
    """Not zero, at the maximum, vanished."""
    pairs = list(zip(values, payload, strict=True))
    return sum(v != 0 for v, _ in pairs), sum(abs(q) == fmt.max for _, q in pairs), sum(v != 0 and q == 0 for v, q in pairs)


@scaled
def test_a_packed_bucket_is_counted_in_its_place_and_absent_tensors_are_not(fmt):
    statistics = Statistics([1, 12, 12, 12], CPU, always=True)
    bucket = Bucket([torch.zeros(12) for _ in "abc"], list("abc"), fmt, [Piece(i, 0, 12, 0) for i in range(3)], 1, 0)
    flat = bucket.packed.pack([planted(fmt), planted(fmt), torch.zeros(12)], fmt)
    statistics.observe_packed(1, bucket, [planted(fmt), None, torch.zeros(12)], flat, torch.ones(3))
    assert statistics.counts[:, 1].tolist() == [9, 3, 2, 0, 0, 0]
    assert not statistics.counts[:, [0, 2, 3]].any()
    statistics.clear()
    assert not statistics.counts.any()


@scaled
@pytest.mark.parametrize("rank", [0, 1])
def test_pieces_of_a_sum_add_up_to_their_tensor(fmt, rank):
    """Tensor b is cut: rank 0 owns its last row, rank 1 the others and a."""
    values = planted(fmt)
    params = [torch.zeros(3), torch.zeros(3, 4)]
    bucket = Bucket(params, ["a", "b"], fmt, [Piece(0, 0, 3, 1), Piece(1, 0, 1, 1), Piece(1, 1, 1, 1), Piece(1, 2, 1, 0)], 2, rank)
    flat = bucket.packed.pack([values[:3], values.view(3, 4)], FP32)
    payload = quantize(flat, 1.0, fmt)
    statistics = Statistics([5, 3, 12], CPU, always=True)
    reduced = Reduced(payload[bucket.own], None, None, flat[bucket.own])
    statistics.observe_reduced(1, bucket, reduced, torch.ones(2), ranks=2, fp32_sum=True)
    a = by_hand(values[:3].tolist(), quantize(values[:3], 1.0, fmt).float().tolist(), fmt)
    owned = values[8:] if rank == 0 else values[:8]
    b = by_hand(owned.tolist(), quantize(owned, 1.0, fmt).float().tolist(), fmt)
    assert statistics.counts[SUM_SATURATED].tolist() == [0, a[1] * rank, b[1]]
    assert statistics.counts[SUM_VANISHED].tolist() == [0, a[2] * rank, b[2]]
    assert statistics.counts[SUM_NONZERO].tolist() == [0, a[0] * rank, b[0]]
    assert not statistics.counts[:SUM_NONZERO].any()


def test_shares_of_one_rank():
    statistics = Statistics([60, 40], CPU, always=False)
    local = {NONZERO: (50, 30), SATURATED: (5, 0), VANISHED: (4, 4)}
    reduced = {SUM_NONZERO: (30, 10), SUM_SATURATED: (1, 2), SUM_VANISHED: (0, 6)}
    for row, counts in (local | reduced).items():
        statistics.counts[row] = torch.tensor(counts)
    peers = Peers(None, WireBytes())
    assert statistics.shares(peers) == {
        "grad_saturation": 0.05,
        "grad_underflow": 0.1,
        "grad_saturation_reduced": 0.03,
        "grad_underflow_reduced": 0.15,  # of the elements of the sum that are not zero, as grad_underflow of the gradients
    }
    summed, largest = statistics.combine(peers)
    assert summed.equal(statistics.counts)
    assert largest.equal(statistics.counts)


@scaled
def test_tallies_are_the_definitions_of_payload_and_sum(fmt):
    """Rank 1 owns a, and two rows of b in two pieces; the factor 4 is in the payloads, the sum's own scale is 8."""
    values, factor = planted(fmt).nan_to_num(posinf=0), torch.tensor([4.0, 4.0])
    bucket = Bucket([torch.zeros(3), torch.zeros(3, 4)], ["a", "b"], fmt, [Piece(0, 0, 3, 1), Piece(1, 0, 1, 1), Piece(1, 1, 2, 1)], 2, 1)
    gradients = [values[:3], values.view(3, 4)]
    statistics = Statistics([5, 3, 12], CPU, always=False)
    statistics.watch(False, record=True)
    assert statistics.active
    statistics.observe_packed(1, bucket, [None, gradients[1]], bucket.packed.pack(gradients, fmt, factor), factor)
    own = quantize(bucket.packed.pack(gradients, FP32), 8.0, fmt)
    scale_inv = torch.full((2,), 1 / 8)
    reduced = Reduced(own, None, scale_inv, bucket.packed.pack(gradients, FP32) * 4.0)
    statistics.observe_reduced(1, bucket, reduced, factor, ranks=2, fp32_sum=True)
    assert not statistics.tallies[:, 0].any()
    assert not statistics.tallies[0, 1].any()
    for tally, g, scale in (
        (statistics.tallies[0, 2], gradients[1], 4.0),
        (statistics.tallies[1, 1], gradients[0], 8.0),
        (statistics.tallies[1, 2], gradients[1], 8.0),
    ):
        payload = quantize(g, scale, fmt)
        found = judge(tally.tolist())
        assert found["underflow"] == pytest.approx(underflow_frac(g, payload))
        assert found["saturation"] == pytest.approx(saturation_frac(payload, fmt))
        assert found["sqnr_db"] == pytest.approx(sqnr_db(g, payload.float() / scale))
        assert (found["amax"], found["scale"]) == (g.abs().max(), scale)
    statistics.clear()
    statistics.observe_reduced(1, bucket, reduced, factor, ranks=2, fp32_sum=False)  # exchange nccl: the sum in FP32 is nowhere
    assert judge(statistics.tallies[1, 2].tolist())["saturation"] == pytest.approx(saturation_frac(own[3:], fmt))
    statistics.watch(False)
    assert not statistics.active
