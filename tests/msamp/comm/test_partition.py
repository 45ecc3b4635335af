import math

import pytest

from helpers.numerics import golden
from msamp.comm.partition import partition, plan_buckets

SIZES = {"345m": (24, 1024, 1), "1.3b": (24, 2048, 1), "7b": (32, 4096, 1), "13b": (40, 5120, 1), "175b": (96, 12288, 1)}
SIZES |= {"13b-tp2": (40, 5120, 2), "175b-tp8": (96, 12288, 8)}
MODEL = [(300, 16), (64, 16), (64,), (64,), (16, 64), (), (48, 16), (48,), (0, 16), (16, 16), (16,), (5, 0)]
KINDS = ["bf16", "fp8", "fp32", "fp32", "fp8", "fp32", "fp8", "fp32", "fp8", "fp8", "fp32", "fp32"]


def linear_weights(layers, hidden, tp=1):
    return [(3 * hidden // tp, hidden), (hidden, hidden // tp), (4 * hidden // tp, hidden), (hidden, 4 * hidden // tp)] * layers


def elements(shapes, pieces):
    return [piece.rows * math.prod(shapes[piece.tensor][1:]) for piece in pieces]


def assert_tiled(shapes, pieces):
    """Every row of every tensor once, and every tensor somewhere."""
    for tensor, shape in enumerate(shapes):
        mine = sorted((piece.row, piece.rows) for piece in pieces if piece.tensor == tensor)
        ends = [row + rows for row, rows in mine]
        assert [row for row, _ in mine] == [0, *ends[:-1]], (tensor, mine)
        assert ends[-1] == (shape[0] if shape else 1)


def test_golden_pieces_loads_and_padding():
    want = golden("partition")
    found = partition(want["shapes"], want["ranks"])
    assert [list(piece) for piece in found.pieces] == want["pieces"]
    assert list(found.loads) == want["loads"]
    assert found.padding == want["padding"]


@pytest.mark.parametrize("want", golden("partition")["large"], ids=lambda want: f"{want['layers']}x{want['hidden']}-dp{want['ranks']}")
def test_golden_gpt_sizes(want):
    found = partition(linear_weights(want["layers"], want["hidden"]), want["ranks"])
    measured = len(found.pieces), max(found.loads), min(found.loads), found.padding
    assert measured == (want["pieces"], want["max_load"], want["min_load"], want["padding"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_pieces_tile_the_tensors_and_loads_are_theirs(ranks):
    found = partition(MODEL, ranks)
    assert_tiled(MODEL, found.pieces)
    assert list(found.pieces) == sorted(found.pieces)
    loads = [0] * ranks
    for piece, size in zip(found.pieces, elements(MODEL, found.pieces), strict=True):
        loads[piece.owner] += size
    assert list(found.loads) == loads
    assert found.padding == max(loads) / (sum(loads) / ranks) - 1
    assert found == partition(MODEL, ranks)


@pytest.mark.parametrize(
    ("shapes", "ranks", "pieces", "largest"),
    [
        ([], 4, 0, 0),
        ([(0, 8), (8, 0)], 4, 2, 0),
        ([()], 4, 1, 1),
        ([(1, 1000), (8, 0), (10, 10)], 4, 3, 1000),  # one row rules: the rest stays whole
        ([(4,)] * 3, 128, 12, 1),  # fewer elements than ranks
        ([(1, 7)] * 9, 4, 9, 21),  # nothing can be cut
        ([(4096,)], 1000, 4096, 5),  # 22 % above the mean, and no cut does better
    ],
)
def test_what_cannot_be_balanced_ends_with_the_best_cut(shapes, ranks, pieces, largest):
    found = partition(shapes, ranks)
    assert_tiled(shapes, found.pieces)
    assert (len(found.pieces), max(found.loads)) == (pieces, largest)


@pytest.mark.parametrize("size", SIZES)
def test_gpt_linear_weights_stay_within_the_limits(size):
    shapes = linear_weights(*SIZES[size])[::-1]
    for ranks in (2, 8, 128):
        plan = plan_buckets(shapes, ["fp8"] * len(shapes), ranks)
        assert plan.padding <= 0.05
        assert plan.busiest <= 1.25
        assert sum(plan.loads) == sum(map(math.prod, shapes))


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_a_plan_holds_every_tensor_once_in_buckets_of_one_kind(ranks):
    plan = plan_buckets(MODEL, KINDS, ranks, bucket_elements=1100)
    assert sorted(i for bucket in plan.buckets for i in bucket.tensors) == list(range(len(MODEL)))
    assert_tiled(MODEL, [piece for bucket in plan.buckets for piece in bucket.pieces])
    loads, busiest = [0] * ranks, 1.0
    for bucket in plan.buckets:
        assert len({KINDS[i] for i in bucket.tensors}) == 1
        assert sum(math.prod(MODEL[i]) for i in bucket.tensors) <= 1100 or len(bucket.tensors) == 1
        assert {piece.tensor for piece in bucket.pieces} == set(bucket.tensors)
        assert list(bucket.pieces) == sorted(bucket.pieces, key=lambda p: (p.owner, p.tensor, p.row))
        received = [0] * ranks
        for piece, size in zip(bucket.pieces, elements(MODEL, bucket.pieces), strict=True):
            received[piece.owner] += size
        loads = [a + b for a, b in zip(loads, received, strict=True)]
        busiest = max(busiest, max(received) / max(sum(received) / ranks, 1e-9))
    assert list(plan.loads) == loads
    assert plan.padding == pytest.approx(max(loads) / (sum(loads) / ranks) - 1)
    assert plan.busiest == pytest.approx(busiest)
    assert plan == plan_buckets(MODEL, KINDS, ranks, bucket_elements=1100)


def test_what_is_to_stay_whole_is_not_cut_and_the_rest_balances_it():
    shapes = [(64, 16), (64, 16), (64, 16), (128, 8)]
    assert len(partition(shapes, 2).pieces) >= 4
    for whole in ([0, 1, 2], [0, 1, 2, 3]):
        found = partition(shapes, 4, whole=whole)
        pieces = [piece for piece in found.pieces if piece.tensor in whole]
        assert [(piece.tensor, piece.rows) for piece in pieces] == [(i, shapes[i][0]) for i in whole]
    plan = plan_buckets(shapes, ["a", "b", "a", "b"], 2, whole=[0, 2])
    assert [piece.rows for bucket in plan.buckets for piece in bucket.pieces if piece.tensor in (0, 2)] == [64, 64]
    (big, *rest) = partition([(10, 10), (100,)], 2, whole=[0]).pieces
    assert big.rows == 10
    assert sum(piece.rows for piece in rest) == 100
