"""Collectives over any dtype and uneven slices, the bytes they count, and what the survivors say when a rank dies.

A rank dies with exit code 0 here, so that `dist.run` gives the others the time to report into a file before it misses the result.
"""

import datetime
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.numerics import bits, make
from msamp.comm import collectives
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes, all_reduce_sent
from msamp.numerics.formats import E4M3, E5M2
from msamp.parallel.data_parallel import grad_sync

WORLD = 4
SIZES = ([5, 0, 7, 3], [0, 0, 1, 0], [0, 0, 0, 0], [64, 64, 64, 64])
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.uint8)
TIMEOUT, ROLL_CALL = 10.0, 2.0  # seconds


def flat(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return make("normal", (count,), rank).mul(4).abs().to(dtype)


def exchanged(group) -> list:
    """(what, sizes or name, dtype, result, bytes counted) of each collective on this rank."""
    found = []
    rank = torch.distributed.get_rank(group)
    for dtype in DTYPES:
        for sizes in SIZES:
            sizes = sizes[: torch.distributed.get_world_size(group)]
            sent = WireBytes()
            peers = Peers(group, sent)
            received = peers.all_to_all(flat(rank, sum(sizes), dtype), sizes, "x", "activation")
            found.append(("all_to_all", sizes, dtype, [bits(x) for x in received], sent.take()))
            found.append(("all_gather", sizes, dtype, bits(peers.all_gather(flat(rank, sizes[rank], dtype), sizes, "x")), sent.take()))
    return found


def started(group) -> dict:
    """Collectives that are on their way at the same time, with names of their own."""
    sent = WireBytes()
    peers = Peers(group, sent)
    sizes = [2] * peers.ranks
    gathered = peers.start_all_gather(flat(peers.rank, 2, E4M3.dtype), sizes, "x", "activation", "input all-gather")
    received = peers.start_all_to_all(flat(peers.rank, 2 * peers.ranks, torch.bfloat16), sizes, "x", "activation", "output reduce-scatter")
    hop = peers.start_ring(flat(peers.rank, 6, E4M3.dtype).view(2, 3), "x", "activation", "hop")
    two_back = (peers.rank + 2) % peers.ranks  # rank r sends r + 1 elements
    far = torch.empty(two_back + 1, dtype=E5M2.dtype)
    shifted = peers.start_shift(flat(peers.rank, peers.rank + 1, E5M2.dtype), far, -2, "x", "activation", "shift")
    total = peers.all_reduce(torch.ones(1), torch.distributed.ReduceOp.SUM, "x", "activation", "amax all-reduce")
    found = {"received": bits(received.wait()), "gathered": bits(gathered.wait()), "total": float(total)}
    before = flat((peers.rank - 1) % peers.ranks, 6, E4M3.dtype).view(2, 3)
    assert bits(hop.wait()).equal(bits(before))
    assert bits(shifted.wait()).equal(bits(flat(two_back, two_back + 1, E5M2.dtype)))
    found["sent"] = sent.take()
    assert received.wait() is received.wait()
    try:  # torch 2.14 refuses the sizes when the collective starts
        peers.start_all_to_all(torch.ones(3), [1, 1, 1, 1], "three elements").wait()
    except RuntimeError as error:
        found["bad sizes"] = str(error)
    return found


def reduced(group) -> dict:
    ops = torch.distributed.ReduceOp
    sent = WireBytes()
    peers = Peers(group, sent)
    rank = peers.rank
    found = {}
    for name, op in (("MIN", ops.MIN), ("MAX", ops.MAX), ("SUM", ops.SUM)):
        x = torch.tensor([float(rank), -1.0 if rank == 2 else 5.0, float("inf"), 2.0 ** (5 * rank)])
        assert peers.all_reduce(x, op, "x") is x
        found[name] = x.tolist()
    found["sent"] = sent.take()
    peers.all_reduce(torch.ones(7), ops.SUM, "x", None)
    found["uncounted"] = sent.take()
    peers.all_reduce(torch.ones(7, dtype=torch.int64), ops.SUM, "x", "activation")
    found["int64"] = sent.take()
    try:
        peers.all_to_all(torch.ones(3), [1, 1, 1, 1], "three elements")
    except RuntimeError as error:
        found["bad sizes"] = str(error)
    return found


def four_ranks() -> dict:
    some = torch.distributed.new_group([1, 3])
    inside = torch.distributed.get_rank() in (1, 3)
    return {
        "world": exchanged(torch.distributed.group.WORLD),
        "started": started(torch.distributed.group.WORLD),
        "reduced": reduced(torch.distributed.group.WORLD),
        "some": exchanged(some) if inside else [],
        "place": (Peers(some, WireBytes()).rank, Peers(some, WireBytes()).ranks) if inside else None,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return dist.run(four_ranks, WORLD)


@pytest.mark.parametrize(("group", "members"), [("world", (0, 1, 2, 3)), ("some", (1, 3))])
def test_slices_arrive_bit_for_bit_and_every_byte_is_counted(ranks, group, members):
    for rank, member in enumerate(members):
        assert len(ranks[member][group]) == 2 * len(DTYPES) * len(SIZES)
        for what, sizes, dtype, found, sent in ranks[member][group]:
            start, own = sum(sizes[:rank]), sizes[rank]
            if what == "all_to_all":
                want = [bits(flat(r, sum(sizes), dtype)[start : start + own]) for r in range(len(members))]
                assert all(a.equal(b) for a, b in zip(found, want, strict=True)), (sizes, dtype)
                assert sent == {("activation", "all-to-all"): (sum(sizes) - own) * dtype.itemsize}
            else:
                assert found.equal(torch.cat([bits(flat(r, n, dtype)) for r, n in enumerate(sizes)])), (sizes, dtype)
                assert sent == {("weight", "all-gather"): own * (len(members) - 1) * dtype.itemsize}


def test_all_reduce(ranks):
    for rank in ranks:
        assert rank["reduced"]["MIN"] == [0, -1, float("inf"), 1]
        assert rank["reduced"]["MAX"] == [3, 5, float("inf"), 2.0**15]
        assert rank["reduced"]["SUM"] == [6, 14, float("inf"), 1 + 2**5 + 2**10 + 2**15]
        assert rank["reduced"]["sent"] == {("weight", "all-reduce"): 3 * 24}  # 16 bytes, 2 (N - 1) / N of them
        assert rank["reduced"]["uncounted"] == {}
        assert rank["reduced"]["int64"] == {("activation", "all-reduce"): 84}


def test_collectives_on_their_way(ranks):
    for rank, found in enumerate(ranks):
        found = found["started"]
        assert found["gathered"].equal(torch.cat([bits(flat(r, 2, E4M3.dtype)) for r in range(WORLD)]))
        assert found["received"].equal(torch.cat([bits(flat(r, 2 * WORLD, torch.bfloat16)[2 * rank : 2 * rank + 2]) for r in range(WORLD)]))
        assert found["total"] == WORLD
        labels = {"input all-gather": 3 * 2, "output reduce-scatter": 3 * 2 * 2, "amax all-reduce": 6, "hop": 6, "shift": rank + 1}
        assert found["sent"] == {("activation", label): count for label, count in labels.items()}
        assert found["bad sizes"].startswith(f"rank {rank}: the all-to-all of three elements failed: every rank still answers (")


def test_one_rank_runs_no_collective():
    sent = WireBytes()
    peers = Peers(None, sent)
    x = make("normal", (6,)).to(torch.float8_e4m3fn)
    assert (peers.rank, peers.ranks, peers.nccl) == (0, 1, False)
    assert peers.all_reduce(x, torch.distributed.ReduceOp.MIN, "x") is x
    assert peers.all_to_all(x, [6], "x").data_ptr() == x.data_ptr()
    assert peers.all_gather(x, [6], "x") is x
    assert peers.start_all_to_all(x, [6], "x").wait() is x
    assert peers.start_all_gather(x, [6], "x").wait() is x
    assert peers.start_ring(x, "x", "activation", "hop").wait() is x
    assert sent.rows() == {}


def survive(folder: str, action) -> None:
    """Run `action` and write what it raised, and after how long."""
    before = time.monotonic()
    with mock.patch.object(collectives, "ROLL_CALL_SECONDS", ROLL_CALL):
        try:
            action()
        except RuntimeError as error:
            seconds = time.monotonic() - before
            Path(folder, str(torch.distributed.get_rank())).write_text(f"{seconds:.1f} {error}")


def new_groups(*members: list[int]) -> list:
    return [torch.distributed.new_group(ranks, timeout=datetime.timedelta(seconds=TIMEOUT)) for ranks in members]


def backward_with_a_death(group, lost: int) -> None:
    """Three layers, a bucket each; the lost rank exits where the gradient of the middle one has come to be."""
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("first", "middle", "last")})
    sync = grad_sync(model, dict.fromkeys(model.parameters(), E4M3), group, bucket_elements=64)
    if torch.distributed.get_rank() == lost:
        model["middle"].weight.register_hook(lambda g: os._exit(0))
    model["last"](model["middle"](model["first"](torch.ones(2, 8)))).sum().backward()
    sync.finish()


def gather_with_a_death(group) -> None:
    """The first gather ends well; rank 7 exits before it takes part in the second."""
    peers = Peers(group, WireBytes())
    for _ in range(2):
        waiting = peers.start_all_gather(torch.ones(2), [2, 2], "input")
        waiting.wait()
        if torch.distributed.get_rank() == 7:
            os._exit(0)


def dying_groups(folder: str) -> None:
    """World sizes 2, 4 and 2 side by side, as subgroups: the names must be those of the whole world."""
    two, four, waiting = new_groups([0, 1], [2, 3, 4, 5], [6, 7])
    if torch.distributed.get_rank() > 5:
        survive(folder, lambda: gather_with_a_death(waiting))
        return
    group, lost = (two, 1) if torch.distributed.get_rank() < 2 else (four, 3)
    survive(folder, lambda: backward_with_a_death(group, lost))


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("survivors")
    with pytest.raises(FileNotFoundError, match=r"result_[137]\.pkl"):
        dist.run(dying_groups, 8, str(folder), timeout=60)
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize(("rank", "lost"), [(0, 1), (2, 3), (4, 3), (5, 3)])
def test_every_survivor_names_the_lost_rank_and_the_tensor_in_time(reports, rank, lost):
    seconds, message = reports[str(rank)].split(" ", 1)
    assert message.startswith(f"rank {rank}: the all-reduce of the scales of middle.weight failed: rank {lost} does not answer (")
    assert float(seconds) <= TIMEOUT


def test_a_rank_lost_while_a_collective_is_on_its_way_is_named(reports):
    seconds, message = reports["6"].split(" ", 1)
    assert message.startswith("rank 6: the all-gather of input failed: rank 7 does not answer (")
    assert float(seconds) <= TIMEOUT


@pytest.mark.parametrize(("total", "ranks", "sent"), [(8, 4, 12), (9, 4, 14), (4, 3, 6), (5, 2, 5), (0, 8, 0)])
def test_a_ring_all_reduce_sends_two_of_n_minus_one_nths(total, ranks, sent):
    assert all_reduce_sent(total, ranks) == sent


def test_counting_and_taking():
    wire = WireBytes()
    wire.add("weight", "grad all-to-all", 10)
    wire.add("weight", "weight all-gather", 5)
    wire.add("activation", "all-gather", 7)
    wire.add("weight", "grad all-to-all", 1)
    counted = {("weight", "grad all-to-all"): 11, ("weight", "weight all-gather"): 5, ("activation", "all-gather"): 7}
    assert wire.rows() == counted
    assert (wire.total("weight"), wire.total("activation")) == (16, 7)
    assert wire.take() == counted
    assert wire.rows() == {}
    assert wire.total("weight") == 0
