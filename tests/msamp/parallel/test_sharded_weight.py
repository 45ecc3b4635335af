"""Weights that `fully_shard` can cut, by themselves."""

import torch

from msamp.kernels import ops
from msamp.nn.cast_scales import scales_of_weights
from msamp.numerics import formats
from msamp.numerics.recipe import O2
from msamp.numerics.tensor import ScalingTensor
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
