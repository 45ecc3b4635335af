"""The attention half: against torch's own operations in FP64, its recomputation, what it records, values that are not finite."""

import pytest
import torch

from helpers.block_halves import (
    HEADS,
    B,
    H,
    S,
    attention_half,
    attention_settings,
    check_casts,
    fp8_attention,
    plain_attention,
    watch_casts,
)
from helpers.numerics import COAT_GRADIENTS, KINDS, codes, make
from msamp.nn.attention_block import AttentionBlock
from msamp.nn.fp8_attention import CASTS_HERE
from msamp.nn.saved_activations import GroupedFP8
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse

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


def test_the_amax_of_every_operand_enters_its_slot(device):
    half = attention_half(recipe.O3, device)
    x, grad = inputs(device=device)
    run(half, x, grad, attention_settings(half))
    assert all((scaling.amax > 0).all() for scaling in half.scaling.values())
    assert half.scaling["proj"].amax[GRAD_OUTPUT] == grad.abs().amax()


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
