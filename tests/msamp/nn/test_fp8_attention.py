"""FP8 attention with its scales: just in time, delayed, recorded, and what is not finite."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.numerics import make
from msamp.nn.fp8_attention import DP, DQ, GRAD, AttentionScaling, FP8Attention, K, O, Q, V
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.scaling import Delayed

S, B, HEADS, GROUPS, D = 48, 2, 4, 2, 16
OUTPUT, GRADIENTS = 26.0, 19.5  # dB; normal inputs


def leaves(size: float = 1.0) -> list[torch.Tensor]:
    return [(size * make("normal", (S, B, n, D), seed=n)).bfloat16().requires_grad_() for n in (HEADS, GROUPS, GROUPS)]


def scaling(window: int = 2) -> AttentionScaling:
    return AttentionScaling(recipe.O2.with_scaling(Delayed(window)).gemm)


def run(scales: AttentionScaling, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    given = leaves(size)
    out = FP8Attention.of(scales, 1 / math.sqrt(D), causal=True)(*given)
    grad = make("normal", out.shape, seed=9).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, given, grad)


def plain() -> tuple[torch.Tensor, ...]:
    given = [x.detach().double().requires_grad_() for x in leaves()]
    out = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in given), is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return out.detach(), *torch.autograd.grad(out, given, make("normal", out.shape, seed=9).bfloat16().double())


def test_just_in_time_and_delayed_are_the_function():
    scales, want = scaling(), plain()
    state = ScalingState(scales)
    for step in range(4):
        assert scales.delayed == (step >= 2)
        got = run(scales)
        assert got[0].dtype == torch.bfloat16
        assert sqnr_db(want[0], got[0]) > OUTPUT
        assert all(sqnr_db(a, b) > GRADIENTS for a, b in zip(want[1:], got[1:], strict=True))
        state.roll()
    assert scales.history.shape == (9, 2)
    assert (scales.history > 0).all()
    # The scales bring what was seen below the formats' ends, and not below half of it.
    for row, cast in enumerate(scales.casts):
        top = float(scales.history[row].amax() * scales.scale[row])
        assert cast.format.max / 2 < top <= cast.format.max, row


def test_every_amax_is_that_of_its_tensor():
    scales = scaling()
    out, dq, dk, dv = run(scales)
    q, k, v = (x.detach().abs().amax() for x in leaves())
    assert scales.amax[[Q, K, V]].tolist() == [float(q), float(k), float(v)]
    assert scales.amax[GRAD] == make("normal", out.shape, seed=9).bfloat16().abs().amax()
    for row, x in ((O, out), (DQ, dq), (DQ + 1, dk), (DQ + 2, dv)):
        assert abs(float(scales.amax[row] / x.float().abs().amax()) - 1) < 0.14, row  # rounded to two bits
    before = scales.amax.clone()
    run(scales)  # a second micro-batch, or the same one again
    assert scales.amax.equal(before)


def test_an_evaluation_leaves_no_trace():
    scales = scaling()
    with torch.no_grad():
        FP8Attention.of(scales, 0.25, causal=True)(*leaves())
    assert not scales.amax.any()


def test_delayed_scales_are_used_and_saturate():
    scales = scaling()
    state = ScalingState(scales)
    for _ in range(2):
        run(scales, 2.0**-6)
        state.roll()
    out = run(scales)[0]  # 64 times as large as all that was seen: values end at the format's end
    assert float(out.float().abs().amax()) <= 448 * float(scales.scale_inv[V]) * 1.01
    assert scales.amax[V] == leaves()[2].abs().amax()


@pytest.mark.parametrize("steps", [0, 2], ids=["just in time", "delayed"])
def test_what_is_not_finite_reaches_output_and_gradients(steps):
    scales = scaling()
    state = ScalingState(scales)
    for _ in range(steps):
        run(scales)
        state.roll()
    given = leaves()
    attention = FP8Attention.of(scales, 0.25, causal=True)
    out = attention(*given)
    grad = torch.ones_like(out)
    grad[3, 0, 0] = float("inf")
    assert not any(bool(g.isfinite().all()) for g in torch.autograd.grad(out, given, grad))
    assert scales.amax[GRAD].isinf()
    given[1].data[0, 0, 0, 0] = float("nan")
    assert not attention(*given).isfinite().all()
    assert scales.amax[K].isinf()
    state.roll()
    assert scales.scale.isfinite().all()


def test_every_recipe_gives_delayed_rules():
    assert {str(cast.scaling) for cast in AttentionScaling(recipe.COAT.gemm).casts} == {"delayed(16)"}
    assert {str(cast.scaling) for cast in scaling(5).casts} == {"delayed(5)"}
    assert [cast.format.name for cast in scaling().casts] == ["fp8-e4m3"] * GRAD + ["fp8-e5m2"] * (9 - GRAD)
    assert "gradients fp8-e5m2" in repr(scaling())
    assert DP == GRAD + 1
