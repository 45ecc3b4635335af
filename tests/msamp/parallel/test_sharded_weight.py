"""Weights that `fully_shard` can cut, by themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from helpers import dist
from helpers.numerics import make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import ops
from msamp.nn.cast_scales import scales_of_weights
from msamp.numerics import formats
from msamp.numerics.recipe import O2
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.head_exchange import HeadExchange
from msamp.parallel.sharded_weight import GatheredCodes, ShardedWeight


def weight() -> ShardedWeight:
    whole = ScalingTensor.quantize(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), formats.FP16)
    return ShardedWeight(whole.payload, whole.scale_inv, torch.bfloat16)


def test_rows_share_the_scale_and_the_memory():
    w = weight()
    first, second = torch.chunk(w, 2)
    assert isinstance(second, ShardedWeight)
    assert (second.shape, second.dtype) == ((2, 4), torch.bfloat16)
    assert second.scale_inv is first.scale_inv is w.scale_inv
    assert second.payload.data_ptr() == w.payload[3:].data_ptr()


def test_a_copy_has_the_bits_and_the_scale_of_another_weight_of_its_format_and_nothing_else_is_copied():
    w, other = weight(), ScalingTensor.quantize(3 * torch.ones(5, 4), formats.FP16)
    for source in (torch.ones(5, 4, dtype=torch.bfloat16), ScalingTensor.quantize(torch.ones(5, 4), formats.E4M3)):
        with pytest.raises(ValueError, match="load_model"):
            w.copy_(source)
    w.copy_(other)
    assert w.payload.equal(other.payload)
    assert w.scale_inv.equal(other.scale_inv)


CAST = O2.gemm.weight


def test_weights_send_the_codes_of_their_cast_from_the_same_memory_in_every_step():
    weights = [weight(), weight()]
    codes = GatheredCodes(CAST, [torch.Size((5, 4)), torch.Size((6, 4))], torch.device("cpu"))  # the second with a row of padding
    places = []
    for _ in range(2):
        amaxes = torch.stack([w.payload.abs().amax().float() for w in weights])
        codes.take(weights, amaxes)
        for w, amax in zip(weights, amaxes, strict=True):
            multiplier, scale_inv = scales_of_weights(CAST, amax, w.scale_inv)
            assert torch.equal(w.sent.codes[:5], ops.cast(w.payload, multiplier, CAST.format.dtype).view(torch.uint8))
            assert not w.sent.codes[5:].any()
            assert w.sent.scale_inv == scale_inv
            places.append((w.sent.codes.data_ptr(), w.sent.scale_inv.data_ptr()))
            w.payload.mul_(0.25)
            assert w.sent is None
    assert places[:2] == places[2:]


def test_a_weight_that_casts_itself_sends_the_same_codes_and_keeps_the_memory_of_its_scale():
    one, other = weight(), weight()
    amax = one.payload.abs().amax().float()
    GatheredCodes(CAST, [torch.Size((6, 4))], torch.device("cpu")).take([one], amax.view(1))
    alone = other.cast(CAST, 6, amax)
    assert torch.equal(alone.codes[:5], one.sent.codes[:5])
    assert not alone.codes[5:].any()
    assert alone.scale_inv == one.sent.scale_inv
    assert other.cast(CAST, 6, amax).scale_inv is alone.scale_inv


# Attention by an all-to-all of heads against attention of one process: output, gradients, bytes, refusals.


LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 2, 8, 4, 16


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.permute(2, 0, 1, 3).flatten(2).to(query.dtype)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    return [make("normal", (LENGTH, BATCH, n, CHANNELS), seed=i).to(dtype) for i, n in enumerate((HEADS, GROUPS, GROUPS, HEADS))]


def run(exchange: Any, tensors: list[Tensor]) -> list[Tensor]:
    *operands, grad = (x.clone() for x in tensors)
    operands = [x.requires_grad_() for x in operands]
    o = exchange(*operands)
    o.backward(grad.flatten(2))
    return [o.detach().view(grad.shape), *(x.grad for x in operands)]


def on_ranks(dtype: torch.dtype, wire: str) -> dict[str, Any]:
    peers = Peers(torch.distributed.group.WORLD, WireBytes())
    chunks = [x.chunk(2 * peers.ranks) for x in inputs(dtype)]
    own = [torch.cat([x[peers.rank], x[-1 - peers.rank]]) for x in chunks]
    return {"made": run(HeadExchange(peers, attention, wire), own), "sent": peers.sent.rows()}


def together(parts: list[Tensor]) -> Tensor:
    chunks = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in chunks] + [second for _, second in reversed(chunks)])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=str)
def test_the_exchange_changes_no_bit(ranks: int, dtype: torch.dtype):
    found = dist.run(on_ranks, ranks, dtype, "bf16")
    for number, expected in enumerate(run(attention, inputs(dtype))):
        got = together([one["made"][number] for one in found])
        assert got.dtype is dtype
        assert got.equal(expected), number
    each = LENGTH * BATCH * CHANNELS * 2 * (HEADS + GROUPS) // ranks // ranks * (ranks - 1) * dtype.itemsize
    for one in found:
        assert one["sent"] == {("activation", "heads all-to-all"): 2 * each}  # forward and backward


def test_what_cannot_be_divided_is_refused():
    query, key, value, _ = inputs(torch.float32)
    peers = Peers(None, WireBytes())
    assert HeadExchange(peers, attention)(query, key, value).equal(attention(query, key, value))
    with pytest.raises(ValueError, match="an all-to-all of heads got 5 tokens per rank"):
        HeadExchange(peers, attention)(query[:5], key[:5], value[:5])
    peers.ranks = 3
    with pytest.raises(ValueError, match="8 heads in 4 groups cannot be divided between 3 ranks: choose a divisor of both"):
        HeadExchange(peers, attention)(query, key, value)
