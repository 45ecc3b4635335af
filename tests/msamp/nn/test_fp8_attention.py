"""FP8 attention with its scales: just in time, delayed, recorded, and what is not finite."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.numerics import make
from msamp.nn import fp8_attention
from msamp.nn.fp8_attention import DP, DQ, GRAD, AttentionScaling, FP8Attention, K, O, Q, V
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe
from msamp.numerics.accumulation import accumulating, judge_sums
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize
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
    q, k, v = (x.detach().float() for x in leaves())
    assert scales.amax[[Q, K]].tolist() == [float(q.abs().amax()), float(k.abs().amax())]
    torch.testing.assert_close(scales.amax[V], (v - v[1:].mean(0)).abs().amax())  # without the mean of all tokens but the first
    grad = make("normal", out.shape, seed=9).bfloat16().abs()
    assert grad[1:].amax() * 0.5 < scales.amax[GRAD] <= grad.amax()  # less the first token's share
    for row, x in ((DQ, dq), (DQ + 1, dk[1:]), (DQ + 2, dv[1:])):  # what the first token adds is not cast
        assert abs(float(scales.amax[row] / x.float().abs().amax()) - 1) < 0.14, row  # rounded to two bits
    assert scales.amax[O] > 0
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
    run(scales)  # 64 times as large as all that was seen: values end at the format's end
    assert scales.amax[O] <= 448 * scales.scale_inv[V] * 1.05  # the codes of a row's weights add up to nearly 1
    assert scales.amax[V] > 64 * 2.0**-7


def with_sink(weight: float, size: float, mean: float) -> list[torch.Tensor]:
    """Query, key, value, and the output's gradient: the first token has about this weight for every query, and a value of `size` times the
    others' norm; values have a mean of `mean` deviations."""
    q, k, v = (make("normal", (256, 1, n, 32), seed=n) for n in (4, 2, 3))
    v = v[:, :, :2] + mean * make("normal", (1, 1, 2, 32), seed=5)
    q += 1.0
    k -= k.mean(-1, keepdim=True)
    k[0] = (math.log(256) + 0.5 + math.log(weight / (1 - weight))) / math.sqrt(32)
    v[0] *= size * v[1:].norm(dim=-1).mean() / v[0].norm(dim=-1, keepdim=True)
    return [x.bfloat16() for x in (q, k, v, make("normal", (256, 1, 4, 32), seed=6) + 0.05)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("weight", "size", "mean"), [(0.5, 0.2, 1.0), (0.9, 0.2, 0.5), (0.99, 0.02, 0.5)])
def test_a_sink_and_a_mean_of_the_values_lose_no_precision(weight, size, mean, causal):
    *given, grad = with_sink(weight, size, mean)
    wanted = [x.double().requires_grad_() for x in given]
    o = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in wanted), is_causal=causal, enable_gqa=True).permute(2, 0, 1, 3)
    want = [o.detach(), *torch.autograd.grad(o, wanted, grad.double())]
    leaf = [x.requires_grad_() for x in given]
    out = FP8Attention.of(scaling(), 1 / math.sqrt(32), causal=causal)(*leaf)
    got = [out.detach().view(o.shape), *torch.autograd.grad(out, leaf, grad.flatten(2))]
    for name, low, a, b in zip(("o", "dq", "dk", "dv"), (29.0, 18.0, 18.0, 20.0), want, got, strict=True):
        rest = slice(1, None) if name == "dk" else slice(None)  # the first key's gradient is a sum of all queries' errors
        assert sqnr_db(a[rest], b[rest]) > low, name
        assert abs(float((a[rest] * b[rest]).sum() / (a[rest] * a[rest]).sum()) - 1) < (0.006 if name == "o" else 0.04), name


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_gradients_of_many_queries_are_sums_over_parts_of_them(causal, monkeypatch):
    *given, grad = with_sink(0.5, 0.2, 0.5)
    leaf = [x.requires_grad_() for x in given]

    def gradients(queries: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(fp8_attention, "FP8_QUERIES", queries)
        out = FP8Attention.of(scaling(), 1 / math.sqrt(32), causal=causal)(*leaf)
        return torch.autograd.grad(out, leaf, grad.flatten(2))

    at_once, in_parts = gradients(256), gradients(100)
    assert not at_once[1].equal(in_parts[1])
    for a, b in zip(at_once, in_parts, strict=True):
        assert sqnr_db(a[1:], b[1:]) > 19.0  # each part's result is rounded to two bits


def test_long_sums_in_the_tensor_core_keep_their_size():
    """In the accumulator of Hopper's FP8 tensor cores, values with a mean lose a part of their sums; without it they do not. A record shows
    both."""
    s, d = 2048, 16
    q, k, v = (make("normal", (s, 1, 1, d), seed=n).bfloat16() for n in range(3))
    v += 1
    scales, rows = scaling(), torch.zeros(2, 3, dtype=torch.float64)
    scales.sums["record"] = {"output": rows[0]}
    attention = FP8Attention.of(scales, 1 / math.sqrt(d), causal=True)
    want = scaled_dot_product_attention(*(x.double().permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True).permute(2, 0, 1, 3)
    with accumulating("hopper"):
        cured = attention(q, k, v)
        scales.sums["record"] = {"output": rows[1]}
        of = attention.cast(q, k, v)
        wide, of_v = attention.cast_one(v, V)  # with the mean
        plain = attention.attend(of._replace(value=wide, scale_invs=torch.stack([*of.scale_invs[:2], of_v])))
    late = slice(-s // 8, None)
    for got, low, high in ((cured.view(want.shape), 0.997, 1.003), (dequantize(plain.o, plain.o_scale_inv), 0.9, 0.98)):
        assert low < float((got[late].double() * want[late]).sum() / want[late].square().sum()) < high
    assert judge_sums(rows[1].tolist())[0] < 0.99 < judge_sums(rows[0].tolist())[0]


def test_gradients_keep_their_size():
    """Roundings to two or three bits on their way would shrink dQ and dK by 1 %, dV by 0.6 %, at any length."""
    q, k, v, grad = (make("normal", (1024, 1, 2, 32), seed=n) for n in range(4))
    given = [x.bfloat16().requires_grad_() for x in (q / 2, k, v + 1)]
    grad = (grad + 0.25).bfloat16()
    wanted = [x.detach().double().requires_grad_() for x in given]
    want = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in wanted), is_causal=True).permute(2, 0, 1, 3)
    out = FP8Attention.of(scaling(), 1 / math.sqrt(32), causal=True)(*given)
    got = torch.autograd.grad(out, given, grad.flatten(2))
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(want, wanted, grad.double()), got, strict=True):
        assert abs(float((a[1:] * b[1:]).sum() / a[1:].square().sum()) - 1) < 0.005, name
        assert sqnr_db(a[1:], b[1:]) > 19.0, name


def test_a_single_token_is_refused():
    with pytest.raises(ValueError, match="sequences of 1 token"):
        FP8Attention.of(scaling(), 0.25, causal=True)(*(x[:1] for x in leaves()))


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
