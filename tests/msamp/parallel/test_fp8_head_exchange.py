"""FP8 attention between all-to-alls of heads against one process's: nearly the same in every step, scales, bytes, what is not finite."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from helpers.numerics import make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.cast_scales import CastScales
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize
from msamp.numerics.scaling import Delayed
from msamp.parallel.fp8_head_exchange import FP8HeadExchange

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 2, 8, 4, 16
SCALE = 1 / math.sqrt(CHANNELS)
STEPS = 4  # two just in time, two delayed


def own(x: Tensor, peers: Peers) -> Tensor:
    chunks = x.chunk(2 * peers.ranks)
    return torch.cat([chunks[peers.rank], chunks[-1 - peers.rank]])


def together(parts: list[Tensor]) -> Tensor:
    chunks = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in chunks] + [second for _, second in reversed(chunks)])


def inputs(step: int) -> list[Tensor]:
    """Query, key, value and the output's gradient. Tokens and heads differ in size, so that the amaxes of ranks and heads differ. In step 1
    all gradients of the last rank's tokens are zero, as where nothing of them counts in the loss."""
    tensors = []
    for number, n in enumerate((HEADS, GROUPS, GROUPS, HEADS)):
        sizes = torch.linspace(0.2, 3, LENGTH)[:, None, None, None] * torch.linspace(1, 9, n)[:, None]
        tensors.append(sizes * make("normal", (LENGTH, BATCH, n, CHANNELS), seed=10 * step + number))
    tensors[3] *= 1e-3
    if step == 1:
        tensors[3][LENGTH // 4 : -LENGTH // 4] = 0
    return tensors


def attention(peers: Peers | None, causal: bool) -> tuple[AttentionScaling, Any]:
    """The scales, and what returns FP8 attention with the current ones."""
    gemm = recipe.O2.with_scaling(Delayed(2)).gemm
    scales = AttentionScaling(gemm)
    if peers is None:
        return scales, lambda: FP8Attention.of(scales, SCALE, causal=causal)
    return scales, lambda: FP8HeadExchange(scales, SCALE, causal, True, peers)


def packed(parts: list[Tensor]) -> Tensor:
    """Query, key and value as a projection in Megatron's order."""
    query, key, value = parts
    grouped = [query.unflatten(2, (GROUPS, -1)), key.unsqueeze(3), value.unsqueeze(3)]
    return torch.cat(grouped, 3).flatten(2)


def steps(peers: Peers | None, causal: bool) -> dict[str, Any]:
    """Output and gradients of each step: dequantized by autograd, and codes as a fused block reads them, with rotary embedding."""
    alone = Peers(None, WireBytes()) if peers is None else peers
    scales, now = attention(peers, causal)
    angles = torch.arange(LENGTH, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.1] * (CHANNELS // 2))
    cos, sin = own(angles.cos(), alone), own(angles.sin(), alone)
    state, found, codes = ScalingState(scales), [], []
    for step in range(STEPS):
        *operands, grad = (own(x, alone) for x in inputs(step))
        operands = [x.requires_grad_() for x in operands]
        o = now()(*operands)
        o.backward(grad.flatten(2))
        found.append([o.detach().view(grad.shape), *(x.grad for x in operands)])
        fp8, scale_inv = now(), torch.zeros(())
        of = fp8.exchange(fp8.rotate(packed([x.detach() for x in operands]), cos, sin, HEADS, GROUPS))
        attended = fp8.attend(of)
        output = fp8.output(of, attended, torch.float8_e4m3fn, CastScales(None, None, None), scale_inv)
        prepared = fp8.prepare(of, attended, grad.flatten(2), scale_inv)
        assert output.view(torch.uint8).equal(prepared.codes.view(torch.uint8))
        *made, scale_invs, sink = fp8.prepared_gradients(of, prepared)
        codes.append([dequantize(output, scale_inv), *sink.add_to(*(dequantize(x, y) for x, y in zip(made, scale_invs, strict=True)))])
        state.roll(alone.group)
    sent = alone.sent.rows()
    return {"steps": found, "codes": codes, "sent": sent, "scale": scales.scale, "history": scales.history}


def on_ranks(causal: bool) -> dict[str, Any]:
    return steps(Peers(torch.distributed.group.WORLD, WireBytes()), causal)


@pytest.mark.parametrize(("ranks", "causal"), [(2, True), (4, False)])
def test_results_are_those_of_one_process(ranks: int, causal: bool):
    """But for the order in which the ranks' values are summed to their mean, by which a code may change."""
    found, alone = dist.run(on_ranks, ranks, causal), steps(None, causal)
    for step in range(STEPS):
        for number in range(4):
            for kind in ("steps", "codes"):
                got = together([one[kind][step][number] for one in found])
                assert sqnr_db(alone[kind][step][number], got) > 40.0, (kind, step, number)
    for one in found:
        assert one["scale"].equal(found[0]["scale"])
        torch.testing.assert_close(one["history"], alone["history"], rtol=0.2, atol=0.0)
    element = LENGTH // ranks * BATCH * CHANNELS
    # q, k, v, o, dQ, dK, dV a byte each, dO four (in FP32), ds; where codes are asked for, o twice.
    once = element * (2 * HEADS + 4 * GROUPS + HEADS + 4 * HEADS) + LENGTH // ranks * BATCH * HEADS * 4
    scalars = 4 * (3 + 3)
    for one in found:
        assert one["sent"]["activation", "heads all-to-all"] > STEPS * (once // ranks + scalars) * (ranks - 1)


def not_finite(place: int) -> list[list[bool]]:
    """Whether output and gradients are finite after an infinity in a tensor of the last rank, with just-in-time and with delayed scales."""
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    scales, now = attention(peers, True)
    state, found = ScalingState(scales), []
    for step in range(3):
        *operands, grad = (own(x, peers).clone() for x in inputs(step))
        if peers.rank == peers.ranks - 1 and step != 1:
            (*operands, grad)[place][0, 0, 0, 0] = float("inf")
        operands = [x.requires_grad_() for x in operands]
        o = now()(*operands)
        o.backward(grad.flatten(2))
        found.append([bool(x.isfinite().all()) for x in (o, *(x.grad for x in operands))])
        state.roll(peers.group)
    return found[::2]


@pytest.mark.parametrize("place", [1, 3], ids=["key", "gradient"])
def test_what_is_not_finite_on_one_rank_is_so_on_all(place: int):
    expected = [place != 1, False, False, False]
    for just_in_time, delayed in dist.run(not_finite, 2, place):
        assert just_in_time == expected
        assert delayed == expected


def evaluated() -> tuple[bool, bool]:
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    scales, now = attention(peers, True)
    query, key, value, _ = (own(x, peers) for x in inputs(0))
    with torch.no_grad():
        o = FP8HeadExchange(scales, SCALE, True, False, peers)(query, key, value)
    return bool(scales.amax.any()), o.equal(now()(query, key, value))


def test_an_evaluation_leaves_no_trace_and_computes_the_same():
    assert dist.run(evaluated, 2) == [(False, True)] * 2


def test_what_cannot_be_divided_is_refused_and_one_rank_exchanges_nothing():
    peers = Peers(None, WireBytes())
    query, key, value, _ = inputs(0)
    _, alone = attention(None, True)
    _, one = attention(peers, True)
    assert one()(query, key, value).equal(alone()(query, key, value))
    with pytest.raises(ValueError, match="an all-to-all of heads got 5 tokens per rank"):
        one()(query[:5], key[:5], value[:5])
    peers.ranks = 3
    with pytest.raises(ValueError, match="8 heads in 4 groups cannot be divided between 3 ranks: choose a divisor of both"):
        one().exchange(alone().cast(query, key, value))
