"""Gathering rows and adding up partial sums over 3 and 4 ranks, against their definition on one process: bit for bit."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from helpers.numerics import KINDS, bits, make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.cast_scales import CastScales
from msamp.nn.gemm import Operand, RowProduct
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.recipe import Cast
from msamp.parallel.sequence_parallel import shared_amax, start_gather, start_sum, sum_product

WORLDS = (4, 3)  # the second as a subgroup
SCATTERED, WHOLE = (24, 5), ((5, 3), (1, 2), (24, 5))  # shapes of partial sums; (1, 2) leaves ranks without a slice
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 2.0**4  # a delayed one
SUMS = [
    (scatter, shape, dtype, fmt, delayed, kind)
    for scatter, dtype, fmt, delayed, kind in itertools.product((True, False), DTYPES, (None, E4M3, E5M2), (False, True), KINDS)
    for shape in ((SCATTERED,) if scatter else WHOLE)
    if fmt is not None or not delayed
]


def partial(rank: int, shape: tuple[int, int], dtype: torch.dtype, kind: str) -> Tensor:
    return (make(kind, shape, rank) * 3).clamp(-6e4, 6e4).to(dtype)


def slot(delayed: bool) -> CastScales:
    return CastScales(torch.tensor(SCALE), torch.tensor(1 / SCALE), torch.zeros(())) if delayed else CastScales(None, None, torch.zeros(()))


def sums(peers: Peers) -> dict[tuple, dict[str, Any]]:
    found = {}
    for key in SUMS:
        scatter, shape, dtype, fmt, delayed, kind = key
        used = slot(delayed)
        mine = partial(peers.rank, shape, dtype, kind)
        waiting = start_sum(mine, peers, "output", scatter=scatter, wire=None if fmt is None else (used, Cast(fmt)))
        found[key] = {"sum": waiting(), "amax": float(used.amax), "sent": peers.sent.take(), "untouched": mine}
    return found


def bad_sums(peers: Peers) -> dict[tuple, Tensor]:
    """Rank 1's partial sums hold one bad value, which stands in rank 0's block; the scale is a delayed one."""
    found = {}
    for scatter, bad in itertools.product((True, False), (math.nan, math.inf)):
        mine = partial(peers.rank, SCATTERED, torch.float32, "normal")
        if peers.rank == 1:
            mine[0, 2] = bad
        found[scatter, str(bad)] = start_sum(mine, peers, "output", scatter=scatter, wire=(slot(True), Cast(E5M2)))()
    return found


def twice(peers: Peers) -> float:
    """The amax that a slot has after two sums of one step, the second half as large."""
    used, mine = slot(False), partial(peers.rank, SCATTERED, torch.float32, "normal")
    for part in (mine, mine / 2):
        start_sum(part, peers, "output", scatter=True, wire=(used, Cast(E4M3)))()
    return float(used.amax)


def rows(rank: int, dtype: torch.dtype, columns: int = 5) -> Tensor:
    return make("normal", (6, columns), rank).to(dtype)


def gathers(peers: Peers) -> dict[str, Any]:
    waiting = [start_gather(rows(peers.rank, dtype), peers, "input all-gather") for dtype in (E4M3.dtype, *DTYPES)]
    whole = [wait() for wait in reversed(waiting)]
    amax = shared_amax(torch.tensor(float(peers.rank)), peers)
    return {"whole": [bits(x) for x in whole], "shape": whole[0].shape, "amax": float(amax), "sent": peers.sent.take()}


def products(peers: Peers) -> dict[str, Tensor]:
    """The product of gathered rows, and the sum of partial products, in one piece and in pieces, as copies between GPUs have them."""
    own, right = rows(peers.rank, E4M3.dtype, 32), Operand.tensorwise(rows(9, E4M3.dtype, 32), scale_inv=torch.tensor(0.5))
    partial = RowProduct(torch.tensor(0.25), right, None, torch.bfloat16, True)
    whole, found = torch.cat([own] * peers.ranks), {}
    for peers.copies in (False, True):
        gathered = start_gather(own, peers, "input all-gather")
        found[f"gathered {peers.copies}"] = gathered.product(partial)
        found[f"again {peers.copies}"] = bits(gathered())
    found["sum False"] = start_sum(partial.of(whole), peers, "output", scatter=True)()
    found["sum True"] = sum_product(partial, whole, peers, "output")
    return found


def on_ranks() -> dict[int, dict[str, Any]]:
    three = torch.distributed.new_group([0, 1, 2])
    groups = {4: torch.distributed.group.WORLD, 3: three if torch.distributed.get_rank() < 3 else None}
    found = {}
    for world, group in groups.items():
        if group is not None:
            peers = Peers(group, WireBytes())
            found[world] = {"sums": sums(peers), "gathers": gathers(peers), "bad": bad_sums(peers), "twice": twice(peers)}
            found[world]["products"] = products(peers)
    return found


@functools.cache
def everything() -> list[dict[int, dict[str, Any]]]:
    return dist.run(on_ranks, 4)


def ranks(world: int) -> list[dict[str, Any]]:
    return [found[world] for found in everything()[:world]]


over_worlds = pytest.mark.parametrize("world", WORLDS)

# ---------------------------------------------------------------------------------------------------------------- the definition


def cast(x: Tensor, scale: float, fmt: Format) -> Tensor:
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).float()


def in_order(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, [part.float() for part in parts])


def definition(parts: list[Tensor], scatter: bool, fmt: Format | None, delayed: bool) -> tuple[Tensor, float]:
    """The whole sum and the amax."""
    amax = max(float(part.abs().max()) for part in parts)
    if fmt is None:
        return in_order(parts).to(parts[0].dtype), 0.0
    scale = SCALE if delayed else 2.0 ** math.floor(math.log2(fmt.max / amax))
    scale = scale / 2 if not delayed and amax * scale > fmt.max else scale
    total = in_order([cast(part, scale, fmt) for part in parts])
    if not scatter:
        room = {3: 4, 4: 4}[len(parts)]
        total = cast(total, 1 / room, fmt) * room
    return (total / scale).to(parts[0].dtype), amax


# -------------------------------------------------------------------------------------------------------------------------- tests


@over_worlds
@pytest.mark.parametrize("fmt", [None, E4M3, E5M2], ids=str)
def test_sums_are_those_of_the_definition(world, fmt):
    for key in [key for key in SUMS if key[3] == fmt]:
        scatter, shape, dtype, _, delayed, kind = key
        parts = [partial(rank, shape, dtype, kind) for rank in range(world)]
        want, amax = definition(parts, scatter, fmt, delayed)
        for rank, found in enumerate(ranks(world)):
            got = found["sums"][key]["sum"]
            assert bits(got).equal(bits(want.chunk(world)[rank] if scatter else want)), (key, rank)
            assert got.shape == ((shape[0] // world, shape[1]) if scatter else shape)
            recorded = float(parts[rank].abs().max()) if delayed else amax
            assert found["sums"][key]["amax"] == recorded, key
            assert found["sums"][key]["untouched"].equal(parts[rank])


@over_worlds
def test_the_bytes_of_sums(world):
    for key in SUMS:
        scatter, shape, dtype, fmt, delayed, _ = key
        even, more = divmod(math.prod(shape), world)
        for rank, found in enumerate(ranks(world)):
            own = even + (rank < more)
            width = dtype.itemsize if fmt is None else 1
            sent = (math.prod(shape) - own + (0 if scatter else own * (world - 1))) * width
            want = {("activation", "output reduce-scatter" if scatter else "output all-reduce"): sent}
            if fmt is not None and not delayed:
                want["activation", "amax all-reduce"] = -(-2 * (world - 1) * 4 // world)
            assert found["sums"][key]["sent"] == want, (key, rank)


@over_worlds
def test_the_largest_amax_of_a_step_stays(world):
    largest = max(float(partial(rank, SCATTERED, torch.float32, "normal").abs().max()) for rank in range(world))
    assert [found["twice"] for found in ranks(world)] == [largest] * world


@over_worlds
def test_rows_are_gathered_in_rank_order_whatever_is_waited_for_first(world):
    for found in ranks(world):
        found = found["gathers"]
        want = [torch.cat([bits(rows(rank, dtype)) for rank in range(world)]) for dtype in (E4M3.dtype, *DTYPES)]
        assert all(a.equal(b) for a, b in zip(found["whole"], reversed(want), strict=True))
        assert found["shape"] == (6 * world, 5)
        assert found["amax"] == world - 1
        assert found["sent"]["activation", "input all-gather"] == (world - 1) * 30 * (1 + 4 + 2 + 2)


@over_worlds
def test_a_bad_value_of_one_rank_is_not_lost(world):
    """NaN stays in the payload. An infinity saturates there, but its rank's result is NaN, as it is for a NaN."""
    parts = [partial(rank, SCATTERED, torch.float32, "normal") for rank in range(world)]
    for rank, found in enumerate(ranks(world)):
        for (scatter, bad), got in found["bad"].items():
            if rank == 1:
                assert got.isnan().all()
            elif rank == 0 or not scatter:
                assert got[0, 2].isnan() == (bad == "nan")
                assert int(got.isnan().sum()) == (bad == "nan")
            else:
                assert got.equal(definition(parts, True, E5M2, True)[0].chunk(world)[rank])


@over_worlds
def test_products_in_pieces_have_the_bits_of_those_in_one(world):
    for found in ranks(world):
        found = found["products"]
        for name in ("gathered", "again", "sum"):
            assert found[f"{name} True"].equal(found[f"{name} False"]), name
