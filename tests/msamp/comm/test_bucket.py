"""Layout of a bucket: slices by owner, nothing padded, every element in its place once."""

import itertools
import math

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import bits, make
from msamp.comm.bucket import Bucket, GuessedPack
from msamp.comm.partition import Piece, plan_buckets
from msamp.kernels.reference.grad_stats import carried, grad_stats
from msamp.numerics.formats import ALL, E4M3, E5M2, FP16
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor

SHAPES = [(7,), (3, 5, 7), (), (64, 33), (0, 4), (130, 3), (1,), (4, 0), (1, 257)]
formats = pytest.mark.parametrize("fmt", ALL, ids=str)
world_sizes = pytest.mark.parametrize("ranks", [1, 2, 4, 16])


def planned(ranks: int, rank: int = 0, shapes=SHAPES) -> tuple[Bucket, tuple[Piece, ...]]:
    (plan,) = plan_buckets(shapes, ["one"] * len(shapes), ranks, 10**9).buckets
    params = [torch.zeros(shape) for shape in shapes]
    return Bucket(params, [f"p{i}" for i in range(len(shapes))], E4M3, plan.pieces, ranks, rank), plan.pieces


@world_sizes
def test_segments_tile_the_flat_buffer_owner_after_owner(ranks):
    bucket, pieces = planned(ranks)
    assert bucket.pieces[0].start == 0
    for a, b in itertools.pairwise(bucket.pieces):
        assert b.start == a.start + a.elements
        assert (a.owner, a.index, a.row) < (b.owner, b.index, b.row)
    assert bucket.pieces[-1].start + bucket.pieces[-1].elements == sum(math.prod(shape) for shape in SHAPES)
    assert sorted((s.index, s.row, s.rows, s.owner) for s in bucket.pieces) == sorted(map(tuple, pieces))
    assert bucket.cut == (len(pieces) > len(SHAPES))


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    return [make("log-normal", shape or (1,), i).view(shape).to(dtype) for i, shape in enumerate(SHAPES)]


@each_value(ranks=[1, 2, 4, 16], fmt=ALL)
def test_flat_buffer_holds_the_casts_of_the_rows_of_every_piece(fmt, ranks):
    bucket, pieces = planned(ranks)
    factor = torch.tensor([3.0**-i for i in range(len(SHAPES))]) if fmt.scaled else None
    made = gradients(torch.bfloat16)
    values = [quantize(g, 1.0 if factor is None else factor[i], fmt) for i, g in enumerate(made)]
    flat = bucket.packed.pack(made, fmt, factor)
    ordered = sorted(pieces, key=lambda piece: (piece.owner, piece.tensor, piece.row))
    rows = [values[i][row : row + rows] if values[i].dim() else values[i] for i, row, rows, _ in ordered]
    assert flat.dtype is fmt.dtype
    assert bits(flat).equal(torch.cat([bits(x) for x in rows]))


@each_value(ranks=[1, 2, 4, 16], fmt=ALL)
def test_unflatten_is_the_way_back(fmt, ranks):
    bucket, _ = planned(ranks)
    values = [quantize(g, 1.0, fmt) for g in gradients(torch.float32)]
    back = bucket.unflatten(bucket.packed.pack(gradients(torch.float32), fmt))
    for x, y in zip(values, back, strict=True):
        assert y.shape == x.shape
        assert y.dtype is x.dtype
        assert bits(x).equal(bits(y))


@each_value(ranks=[1, 2, 4, 16], fmt=[fmt for fmt in ALL if fmt.scaled])
def test_a_guess_changes_no_bit(fmt, ranks):
    """Three steps: nothing to guess from, factors as they were, some others."""
    bucket, _ = planned(ranks)
    made = gradients(torch.bfloat16)
    factor = torch.tensor([2.0**-i for i in range(len(SHAPES))])
    for step_factor in (factor, factor, torch.where(torch.arange(len(SHAPES)) % 2 == 0, factor, 2 * factor)):
        want = planned(ranks)[0].packed.pack(made, fmt, step_factor)
        amaxes = bucket.packed.measure(made, fmt)
        assert amaxes.tolist() == [float(g.abs().max()) if g.numel() else 0.0 for g in made]
        flat = bucket.packed.pack(made, fmt, step_factor)
        assert bits(flat).equal(bits(want))
        if fmt != E4M3:
            assert bucket.packed.tallies(flat) is None
            continue
        for piece, (largest, *squares) in zip(bucket.pieces, bucket.packed.tallies(flat), strict=True):
            codes = want[piece.start : piece.start + piece.elements]
            stats, sums = grad_stats(None, [ScalingTensor(codes, torch.ones(()))])
            assert largest.to(torch.int32).view(torch.float32) == stats[0, 0]
            assert carried(torch.stack(squares)[None]).equal(sums)


def test_gradients_that_change_after_they_were_measured_are_packed_as_they_are():
    bucket, factor = planned(1)[0], torch.full((len(SHAPES),), 0.5)
    for _ in range(2):  # the second time the guess is right
        made = gradients(torch.bfloat16)
        bucket.packed.measure(made, E4M3)
        for g in made:
            g.mul_(0.75)
        assert bits(bucket.packed.pack(made, E4M3, factor)).equal(bits(planned(1)[0].packed.pack(made, E4M3, factor)))
        bucket.packed.measure(made, E4M3)
        bucket.packed.pack(made, E4M3, factor)


def test_what_was_told_of_a_buffer_holds_until_it_changes():
    bucket, made, factor = planned(1)[0], gradients(torch.bfloat16), torch.full((len(SHAPES),), 0.5)
    bucket.packed.measure(made, E4M3)
    flat = bucket.packed.pack(made, E4M3, factor)
    assert bucket.packed.tallies(flat.clone()) is None
    assert bucket.packed.tallies(flat).shape == (len(bucket.pieces), 3)
    flat[:7].view(torch.uint8).zero_()
    assert bucket.packed.tallies(flat) is None
    bucket.packed.measure(made, E4M3)
    bucket.forget()
    assert bucket.packed.tallies(bucket.packed.pack(made, E4M3, factor)) is None


SPANS = [(0, 0, 40, 0), (2, 40, 25, 40)]  # the second of three tensors has no run
SCALES = [torch.tensor([2.0, 1.0, 0.25]), torch.tensor([2.0, 1.0, 0.25]), torch.tensor([4.0, 8.0, 0.25])]  # no guess, as before, another


def payloads(ranks: int, fmt) -> torch.Tensor:
    return torch.stack([make("log-normal", (65,), rank).clamp(-400, 400) for rank in range(ranks)]).to(fmt.dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_a_mean_is_summed_in_fp32_and_rounded_once_whatever_the_guess(fmt, ranks):
    packed = GuessedPack(SPANS, 3, torch.device("cpu"), tallied=False)
    for factor in SCALES:
        x = payloads(ranks, fmt)
        mean = x[0].float()
        for row in x[1:]:
            mean = mean + row.float()
        mean = mean / ranks
        amaxes = packed.measure([x] * 3, fmt, ranks=ranks)
        assert amaxes.tolist() == [mean[:40].abs().max().item(), 0.0, mean[40:].abs().max().item()]
        out = packed.pack([x] * 3, fmt, factor, ranks=ranks)
        want = torch.cat([quantize(mean[:40], factor[0], fmt), quantize(mean[40:], factor[2], fmt)])
        assert bits(out).equal(bits(want))
        assert packed.tallies(out) is None


def test_a_payload_that_is_not_finite_on_one_rank_makes_the_amax_infinite():
    packed, x = GuessedPack(SPANS, 3, torch.device("cpu"), tallied=False), payloads(3, E4M3)
    x[1, 50] = float("nan")
    assert packed.measure([x] * 3, E4M3, ranks=3).isinf().tolist() == [False, False, True]
