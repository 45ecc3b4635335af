import pytest
import torch
from numerics import make

from msamp.kernels.reference.adamw import load, store_
from msamp.numerics.formats import BF16, FP32
from msamp.optim.state_format import PlainFormat


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_a_plain_state_begins_at_zero_and_takes_what_is_stored(fmt, device):
    plain = PlainFormat(fmt)
    state = plain.init(torch.ones(3, 5, device=device, dtype=torch.bfloat16))
    assert (state.dtype, state.shape, state.device.type) == (fmt.dtype, (3, 5), device.type)
    assert state.eq(0).all()
    value = make("normal", (3, 5), device=device)
    store_([state], [value], None)
    assert state.equal(value.to(fmt.dtype))
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.equal(state.float())


def test_fp32_is_updated_where_it_lies():
    plain = PlainFormat(FP32)
    state = plain.init(torch.ones(4))
    (loaded,) = load([state])
    assert loaded is state
    loaded.add_(1.0)
    store_([state], [loaded], None)
    assert state.eq(1).all()


def test_as_many_states_as_values():
    with pytest.raises(ValueError, match="zip"):
        store_([torch.zeros(1)], [], None)
