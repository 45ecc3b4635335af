"""Weights that `fully_shard` can cut, by themselves."""

import pickle

import pytest
import torch

from msamp.numerics import formats
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.fsdp import ShardedWeight


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


def test_padding_takes_rows_with_their_scale():
    w = weight()
    padded = w.new_zeros(6, 4)
    padded.narrow(0, 0, 5).copy_(w)
    assert torch.equal(padded.payload[:5], w.payload)
    assert not padded.payload[5:].any()
    assert padded.scale_inv == w.scale_inv
    assert padded.scale_inv is not w.scale_inv


def test_plain_values_are_refused():
    w = weight()
    with pytest.raises(ValueError, match=r"cannot copy torch.float32 values to .*float16: .*fsdp.load_model"):
        w.copy_(torch.zeros(5, 4))


def test_a_pickled_weight_is_a_scaling_tensor():
    w = weight()
    again = pickle.loads(pickle.dumps(w))
    assert type(again) is ScalingTensor
    assert torch.equal(again, w)
