"""Copies between the GPUs of a host: what they bring is what NCCL brings; where there can be none, it is said."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from msamp.comm import copies
from msamp.comm.collectives import Peers
from msamp.comm.copies import GATHER_WINDOWS, CopyPeers, choose_peers, obstacle
from msamp.comm.counters import WireBytes


def chosen_over_gloo() -> tuple[Any, ...]:
    group = torch.distributed.group.WORLD
    found = [choose_peers(group, WireBytes(), transport) for transport in ("auto", "nccl")]
    with pytest.raises(ValueError, match=r"transport 'copies': .* the group's backend is gloo, not nccl; choose nccl or auto"):
        choose_peers(group, WireBytes(), "copies")
    return obstacle(group), *((type(peers), words) for peers, words in found)


def test_over_gloo_there_are_no_copies_and_each_rank_says_why():
    why = "the group's backend is gloo, not nccl"
    assert dist.run(chosen_over_gloo, 2) == [(why, (Peers, f"by gloo: {why}"), (Peers, "by gloo"))] * 2


def own(rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    codes = torch.randint(0, 256, (48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(10 * seed + rank))
    return codes.cuda().view(dtype)


def together(group: Any) -> dict[str, Any]:
    """What a collective brings by copies and by NCCL, eager and from a graph, and what is refused."""
    sent = WireBytes(), WireBytes()
    mine, nccl = CopyPeers(group, sent[0]), Peers(group, sent[1])
    found: dict[str, Any] = {"same": [], "graph": []}
    for seed in range(2 * GATHER_WINDOWS):
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            x = own(mine.rank, dtype, seed).view(-1)
            gathered, wanted = (peers.start_all_gather(x, [x.numel()] * 2, "x").wait() for peers in (mine, nccl))
            found["same"].append(gathered.view(torch.uint8).equal(wanted.view(torch.uint8)))
            sizes = [x.numel() // 2] * 2
            pending = mine.start_all_to_all(x, sizes, "x")
            received, wanted = pending.wait().view(2, -1), nccl.start_all_to_all(x, sizes, "x").wait().view(2, -1)
            other = 1 - mine.rank
            found["same"].append(pending.lacks_own and received[other].view(torch.uint8).equal(wanted[other].view(torch.uint8)))
            del gathered, pending, received
    found["bytes"] = sent[0].take() == sent[1].take()
    x, graph = own(mine.rank, torch.float8_e5m2).view(-1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(5):
            gathered = mine.start_all_gather(x, [x.numel()] * 2, "x").wait()
            y = gathered.view(torch.uint8).clone()
            del gathered
    for seed in range(3):
        x.view(torch.uint8).copy_(own(mine.rank, torch.uint8, seed).view(-1))
        graph.replay()
        wanted = torch.cat([own(rank, torch.uint8, seed).view(-1) for rank in range(2)])
        found["graph"].append(y.equal(wanted))
    held = [mine.start_all_gather(x, [x.numel()] * 2, "x").wait() for _ in range(GATHER_WINDOWS)]
    try:
        mine.start_all_gather(x, [x.numel()] * 2, "x")
    except RuntimeError as error:
        found["held"] = str(error)
    del held
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        try:
            mine.start_all_gather(x[:96], [96] * 2, "x")
        except RuntimeError as error:
            found["captured"] = str(error)
    graph.reset()
    return found


def on_two_gpus() -> dict[str, Any]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    group = torch.distributed.group.WORLD
    auto, words = choose_peers(group, WireBytes(), "auto")
    found = together(group) | {"obstacle": obstacle(group), "auto": (auto.copies, words)}
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.multi_gpu
@pytest.mark.timeout(120)
def test_copies_bring_what_nccl_brings():
    ranks = dist.run(on_two_gpus, 2, init=False, timeout=100)
    for found in ranks:
        assert found["obstacle"] is None
        assert all(found["same"])
        assert found["bytes"]
        assert found["graph"] == [True] * 3
        assert "still held" in found["held"]
        assert "before an eager step has exchanged" in found["captured"]
        assert found["auto"] == ranks[0]["auto"]
        assert "us by copies" in found["auto"][1]
    assert copies.TRANSPORTS[0] == "auto"
