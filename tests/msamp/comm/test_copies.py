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
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O3
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.tensor_parallel import SAVED_INPUTS, TensorParallel, column_linear, row_linear


def chosen_over_gloo() -> tuple[Any, ...]:
    group = torch.distributed.group.WORLD
    found = [choose_peers(group, WireBytes(), transport) for transport in ("auto", "nccl")]
    with pytest.raises(ValueError, match=r"transport 'copies' .* the group's backend is gloo, not nccl; choose nccl or auto"):
        choose_peers(group, WireBytes(), "copies")
    return obstacle(group), *((type(peers), words) for peers, words in found)


def test_over_gloo_there_are_no_copies_and_each_rank_says_why():
    why = "the group's backend is gloo, not nccl"
    assert dist.run(chosen_over_gloo, 2) == [(why, (Peers, f"by gloo: {why}"), (Peers, "by gloo"))] * 2


def forbidden_on_one_rank(value: str | None) -> str | None:
    if torch.distributed.get_rank() == 1 and value is not None:
        os.environ["NCCL_P2P_DISABLE"] = value
    copies.dist.get_backend = lambda group: "nccl"  # of this process, which ends with the test
    copies._unmapped = lambda group: None
    return copies.obstacle(torch.distributed.group.WORLD)


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_the_switch_against_direct_links_on_any_rank_forbids_copies_on_all(monkeypatch: pytest.MonkeyPatch, value):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    why = "NCCL_P2P_DISABLE forbids direct copies between GPUs" if value == "1" else None
    assert dist.run(forbidden_on_one_rank, 2, value) == [why] * 2


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
            gathered, wanted = (peers.start_all_gather(x, [x.numel()] * 2, "x") for peers in (mine, nccl))
            found["same"].append(gathered.keep().view(torch.uint8).equal(wanted.wait().view(torch.uint8)))
            sizes = [x.numel() // 2] * 2
            pending = mine.start_all_to_all(x, sizes, "x")
            received, wanted = pending.wait().view(2, -1), nccl.start_all_to_all(x, sizes, "x").wait().view(2, -1)
            other = 1 - mine.rank
            found["same"].append(pending.lacks_own and received[other].view(torch.uint8).equal(wanted[other].view(torch.uint8)))
            pending.done()
    found["bytes"] = sent[0].take() == sent[1].take()
    x, graph = own(mine.rank, torch.float8_e5m2).view(-1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(5):
            y = mine.all_gather(x, [x.numel()] * 2, "x").view(torch.uint8)
    for seed in range(3):
        x.view(torch.uint8).copy_(own(mine.rank, torch.uint8, seed).view(-1))
        graph.replay()
        wanted = torch.cat([own(rank, torch.uint8, seed).view(-1) for rank in range(2)])
        found["graph"].append(y.equal(wanted))
    held = [mine.start_all_gather(x, [x.numel()] * 2, "x") for _ in range(GATHER_WINDOWS)]
    try:
        mine.start_all_gather(x, [x.numel()] * 2, "x")
    except RuntimeError as error:
        found["held"] = str(error)
    for pending in held:
        pending.done()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        try:
            mine.start_all_gather(x[:96], [96] * 2, "x")
        except RuntimeError as error:
            found["captured"] = str(error)
    graph.reset()
    return found


def poison(window: copies.Window) -> None:
    """`give_back` of a window whose memory the next collective of another layer writes: NaN in every FP8 and BF16 format."""
    window._memory.fill_(0x7F)
    window._taken = False


def layers(group: Any, transport: str, saved_input: str) -> list[Tensor]:
    """Output and gradients of a column- and a row-parallel layer over three micro-batches, then an output without gradients."""
    tp = TensorParallel(group, sequence_parallel=True, transport=transport, saved_input=saved_input)
    torch.manual_seed(tp.peers.rank)
    weights = [
        torch.nn.Parameter(ScalingTensor.quantize(torch.randn(shape, device="cuda") / 8, O3.weight)) for shape in ((64, 64), (64, 64))
    ]
    scalings = [LinearScaling(O3.gemm, "cuda", wire=wire) for wire in (O3.gemm.grad_output.format, None)]
    found: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(32, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = row_linear(column_linear(x, weights[0], None, scalings[0], tp), weights[1], scalings[1], tp)
        found += [y.detach(), *torch.autograd.grad(y, (x, *weights), torch.randn_like(y))]
    with torch.inference_mode():
        found.append(row_linear(column_linear(x, weights[0], None, scalings[0], tp), weights[1], scalings[1], tp))
    return found


def on_two_gpus() -> dict[str, Any]:
    group = torch.distributed.group.WORLD
    auto, words = choose_peers(group, WireBytes(), "auto")
    found = together(group) | {"obstacle": obstacle(group), "auto": (auto.copies, words)}
    found["self_test"] = copies.self_test(CopyPeers(group, WireBytes()), Peers(group, WireBytes()))
    wanted = {saved: layers(group, "nccl", saved) for saved in SAVED_INPUTS}
    copies.Window.give_back = poison
    found["poisoned"] = [
        all(a.equal(b) for a, b in zip(layers(group, "copies", saved), wanted[saved], strict=True)) for saved in SAVED_INPUTS
    ]
    return found


@pytest.mark.multi_gpu
def test_copies_bring_what_nccl_brings():
    ranks = dist.on_gpus(on_two_gpus, 2)
    for found in ranks:
        assert found["obstacle"] is None
        assert all(found["same"])
        assert found["bytes"]
        assert found["graph"] == [True] * 3
        assert found["self_test"] is None
        assert found["poisoned"] == [True] * 2
        assert "was not released" in found["held"]
        assert "before an eager step exchanged" in found["captured"]
        assert found["auto"] == ranks[0]["auto"]
        assert "us by copies" in found["auto"][1]
    assert copies.TRANSPORTS[0] == "auto"
