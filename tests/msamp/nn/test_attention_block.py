"""The attention half: against torch's own operations in FP64, its recomputation, what it records, values that are not finite."""

import pytest
import torch

from helpers.block_halves import (
    HEADS,
    B,
    D,
    H,
    S,
    attend,
    attention_half,
    attention_settings,
    check_casts,
    fp8_attention,
    plain_attention,
    watch_casts,
)
from helpers.numerics import COAT_GRADIENTS, KINDS, codes, make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import scaled_mm
from msamp.nn.attention_block import AttentionBlock, split_heads
from msamp.nn.fp8_attention import CASTS_HERE
from msamp.nn.saved_activations import GroupedFP8
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import Current, inverse
from msamp.parallel.head_exchange import HeadExchange

every_level = pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)


def inputs(kind="normal", device="cpu"):
    x = make(kind, (S, B, H), seed=1, device=device).to(torch.bfloat16).requires_grad_()
    return x, make("normal", (S, B, H), seed=2, device=device).to(torch.bfloat16)


def run(half, x, grad, how):
    """x + what attention adds, and the gradients of x and all parameters."""
    through, delta = AttentionBlock.apply(x, *half.arguments(), how)
    leaves = [t for t in (x, *half.arguments()) if t is not None]
    return (through + delta).detach(), list(torch.autograd.grad((through, delta), leaves, (grad, grad)))


# dB of (output, gradient of x, least of the parameters' gradients); normal inputs, E4M3 forward and E5M2 backward.
LEAST_SQNR = (24.0, 20.0, 15.0)


@every_level
@pytest.mark.parametrize(("groups", "rms", "bias"), [(HEADS, False, True), (2, True, False)], ids=["MHA, LayerNorm", "GQA, RMSNorm"])
def test_is_the_function_of_torchs_own_operations(level, groups, rms, bias, device):
    half = attention_half(level, device, groups, bias)
    x, grad = inputs(device=device)
    out, grads = run(half, x, grad, attention_settings(half, groups, rms))
    plain, wide = half.plain(), x.detach().double().requires_grad_()
    want = wide + plain_attention(wide, plain, groups, rms)
    leaves = {"x": wide} | {k: v for k, v in plain.items() if v is not None}
    wanted = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()), grad.double()), strict=True))
    assert sqnr_db(want, out) > LEAST_SQNR[0]
    assert sqnr_db(wanted["x"], grads[0]) > LEAST_SQNR[1]
    for (name, right), got in zip(list(wanted.items())[1:], grads[1:], strict=True):
        assert sqnr_db(right, got.float()) > LEAST_SQNR[2], name


FP8_SQNR = (22.0, 17.0, 14.0)  # with FP8 attention


@pytest.mark.parametrize(("groups", "rms", "bias"), [(HEADS, False, True), (2, True, False)], ids=["MHA, LayerNorm", "GQA, RMSNorm"])
def test_fp8_attention_is_nearly_the_same_function_and_recomputed_to_the_same_bits(groups, rms, bias):
    half = attention_half(recipe.O3, "cpu", groups, bias)
    x, grad = inputs()
    fp8 = fp8_attention(half)
    out, grads = run(half, x, grad, attention_settings(half, groups, rms, fp8=fp8))
    plain, wide = half.plain(), x.detach().double().requires_grad_()
    want = wide + plain_attention(wide, plain, groups, rms)
    leaves = {"x": wide} | {k: v for k, v in plain.items() if v is not None}
    wanted = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()), grad.double()), strict=True))
    assert sqnr_db(want, out) > FP8_SQNR[0]
    assert sqnr_db(wanted["x"], grads[0]) > FP8_SQNR[1]
    for (name, right), got in zip(list(wanted.items())[1:], grads[1:], strict=True):
        assert sqnr_db(right, got.float()) > FP8_SQNR[2], name
    amaxes = fp8.scaling.amax.clone()
    assert (amaxes > 0).all()
    again, recomputed = run(half, x, grad, attention_settings(half, groups, rms, fp8=fp8, recompute=True))
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(grads, recomputed, strict=True))
    assert fp8.scaling.amax.equal(amaxes)


@pytest.mark.parametrize("scaling", [None, Current()], ids=["delayed", "just in time"])
@pytest.mark.parametrize("fp8", [False, True], ids=["attention in BF16", "attention in FP8"])
def test_the_scales_of_products_are_aligned_as_cublas_wants_them(fp8, scaling, monkeypatch):
    half = attention_half(recipe.O3 if scaling is None else recipe.O3.with_scaling(scaling), "cpu")
    x, grad = inputs()
    seen, multiply = [], scaled_mm.emulated_mm

    def aligned(a, b, a_scale_inv, b_scale_inv, dtype):
        seen.append((a_scale_inv.data_ptr() % 16, b_scale_inv.data_ptr() % 16))
        return multiply(a, b, a_scale_inv, b_scale_inv, dtype)

    monkeypatch.setattr(scaled_mm, "emulated_mm", aligned)
    run(half, x, grad, attention_settings(half, fp8=fp8_attention(half) if fp8 else None))
    assert seen == [(0, 0)] * 6


def test_watches_of_fp8_attention_are_told_what_was_cast():
    half = attention_half(recipe.O2, "cpu", 2)
    x, grad = inputs()
    fp8, told = fp8_attention(half), {}
    out, _ = run(half, x, grad, attention_settings(half, 2, fp8=fp8))
    for row in CASTS_HERE:
        fp8.scaling.watches[row] = lambda *found, row=row: told.__setitem__(row, found)
    again, _ = run(half, x, grad, attention_settings(half, 2, fp8=fp8))
    assert out.equal(again)
    assert told.keys() == CASTS_HERE.keys()
    for row, (values, payload, scale_inv) in told.items():
        made = quantize(values, inverse(scale_inv), fp8.scaling.formats[row])
        assert codes(made).equal(codes(payload)), row


@every_level
def test_recomputing_attention_changes_no_bit(level, device):
    half = attention_half(level, device)
    x, grad = inputs(device=device)
    out, kept = run(half, x, grad, attention_settings(half))
    again, recomputed = run(half, x, grad, attention_settings(half, recompute=True))
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_heads_shared_by_one_rank_change_no_bit(recompute):
    half = attention_half(recipe.O2, "cpu", 2)
    x, grad = inputs()
    out, plain = run(half, x, grad, attention_settings(half, 2))
    told = watch_casts(half)
    exchange = HeadExchange(Peers(None, WireBytes()), attend)
    again, shared = run(half, x, grad, attention_settings(half, 2, sharing=exchange, recompute=recompute))
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(plain, shared, strict=True))
    check_casts(half, told)


@pytest.mark.parametrize(("groups", "rms", "bias"), [(HEADS, False, True), (2, True, False)], ids=["MHA, LayerNorm", "GQA, RMSNorm"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_kept_in_groups_changes_no_output_and_little_of_the_gradients(kind, groups, rms, bias, device):
    half = attention_half(recipe.O2, device, groups, bias)
    x, grad = inputs(kind, device)
    out, wanted = run(half, x, grad, attention_settings(half, groups, rms))
    kept, found = run(half, x, grad, attention_settings(half, groups, rms, saved=GroupedFP8()))
    assert kept.equal(out)
    least = COAT_GRADIENTS["attention"][KINDS.index(kind)]
    assert sqnr_db(wanted[0], found[0]) > least[0]
    assert min(sqnr_db(want.float(), got.float()) for want, got in zip(wanted[1:], found[1:], strict=True)) > least[1]


def test_without_gradients_the_output_is_the_same_and_nothing_is_recorded(device):
    half = attention_half(recipe.O3, device)
    x, grad = inputs(device=device)
    with torch.no_grad():
        through, delta = AttentionBlock.apply(x, *half.arguments(), attention_settings(half, keep=False))
    assert not any(scaling.amax.any() for scaling in half.scaling.values())
    out, _ = run(half, x, grad, attention_settings(half))
    assert out.equal(through + delta)


def test_the_amax_of_every_operand_enters_its_slot(device):
    half = attention_half(recipe.O3, device)
    x, grad = inputs(device=device)
    run(half, x, grad, attention_settings(half))
    assert all((scaling.amax > 0).all() for scaling in half.scaling.values())
    assert half.scaling["proj"].amax[GRAD_OUTPUT] == grad.abs().amax()


def test_a_delayed_scale_is_used_as_it_is(device):
    half, just_in_time = attention_half(recipe.O3, device), attention_half(recipe.O3.with_scaling(Current()), device)
    x, grad = inputs(device=device)
    how = attention_settings(half)
    small = how.qkv.x._replace(scale=torch.tensor(2.0**-20, device=device))
    how = how._replace(qkv=how.qkv._replace(x=small))
    out, _ = run(half, x, grad, how)
    usual, _ = run(just_in_time, x, grad, attention_settings(just_in_time))
    assert not out.equal(usual)  # so small a scale makes every element vanish: attention adds the same to all tokens
    added = (out - x.detach()).float()
    assert (added - added[:1, :1]).abs().max() <= 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_output_and_the_gradients(bad, device):
    half = attention_half(recipe.O3, device)
    x, grad = inputs(device=device)
    poisoned = grad.clone()
    poisoned[0, 0, 0] = bad
    _, grads = run(half, x, poisoned, attention_settings(half))
    assert not any(bool(g.isfinite().all()) for g in (grads[0], grads[3], grads[5]))
    with torch.no_grad():
        x[3, 1, 5] = bad
    out, _ = run(half, x, grad, attention_settings(half))
    assert not out.isfinite().all()
    assert half.scaling["qkv"].amax[INPUT] == float("inf")


@pytest.mark.parametrize(("groups", "rms", "bias"), [(HEADS, False, True), (2, True, False)], ids=["MHA, LayerNorm", "GQA, RMSNorm"])
def test_watches_are_told_the_values_before_each_cast_and_change_no_bit(groups, rms, bias, device):
    half = attention_half(recipe.O2, device, groups, bias)
    x, grad = inputs(device=device)
    out, grads = run(half, x, grad, attention_settings(half, groups, rms))
    for scaling in half.scaling.values():
        scaling.amax.zero_()
    told = watch_casts(half)
    again, same = run(half, x, grad, attention_settings(half, groups, rms))
    check_casts(half, told)
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(grads, same, strict=True))


def test_heads_are_split_in_megatrons_order():
    qkv = torch.arange(8 * D, dtype=torch.float32).expand(1, 1, -1)  # groups of 2 queries, a key, a value
    query, key, value = split_heads(qkv, 4, 2)
    assert query[0, 0, :, 0].tolist() == [0, D, 4 * D, 5 * D]
    assert key[0, 0, :, 0].tolist() == [2 * D, 6 * D]
    assert value[0, 0, :, 0].tolist() == [3 * D, 7 * D]
