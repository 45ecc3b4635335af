"""Casts of all experts' weights, against one weight at a time."""

import pytest
import torch

from helpers.numerics import codes, make
from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.expert_cast import expert_cast
from msamp.kernels.reference.scale_from_amax import weight_scales
from msamp.numerics.formats import E4M3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_expert_is_cast_by_itself(dtype):
    weights = (make("normal", (3, 20, 36)) * torch.tensor([1.0, 100.0, 0.0]).view(3, 1, 1)).to(dtype)
    stored = torch.tensor([1.0, 0.5, 2.0])
    y, y_t, scale_invs = expert_cast(weights, stored, E4M3.dtype)
    for e in range(3):
        multiplier, scale_inv = weight_scales(weights[e], stored[e], E4M3.max)
        assert scale_invs[e] == scale_inv
        assert codes(y[e]).equal(codes(cast(weights[e], multiplier, E4M3.dtype)))
        assert codes(y_t[e]).equal(codes(y[e]).t())


def test_what_is_stored_in_fp8_keeps_its_codes():
    payload, stored = make("normal", (2, 8, 16)).to(E4M3.dtype), torch.tensor([0.5, 4.0])
    y, y_t, scale_invs = expert_cast(payload, stored, E4M3.dtype)
    assert y.numel() == 0
    assert y.dtype == E4M3.dtype
    assert codes(y_t).equal(codes(payload).transpose(1, 2))
    assert scale_invs.equal(stored)
    assert scale_invs.data_ptr() != stored.data_ptr(), "an operator returns no view of its argument"


@pytest.mark.parametrize(
    ("payload", "stored", "message"),
    [
        (torch.ones(4, 8), torch.ones(4), r"weights are torch.float32 \(4, 8\); they must be floating-point \[experts, N, K\]"),
        (torch.ones(2, 6, 8), torch.ones(2), "weights have 6 outputs; their transposes need a multiple of 4"),
        (torch.ones(2, 4, 8), torch.ones(1), r"scale_inv is torch.float32 \(1,\); it must be torch.float32 \(2,\)"),
    ],
)
def test_what_is_refused(payload, stored, message):
    with pytest.raises(ValueError, match=message):
        expert_cast(payload, stored, E4M3.dtype)
