"""The MLP half: against torch's own operations in FP64, its recomputation, what it records and keeps."""

import pytest
import torch

from helpers.block_halves import B, H, S, check_casts, mlp_half, mlp_settings, plain_mlp, watch_casts
from helpers.choices import each_value
from helpers.numerics import COAT_GRADIENTS, KINDS, make
from msamp.nn.mlp_block import MLPBlock
from msamp.nn.saved_activations import GroupedFP8
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db

every_level = pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
every_activation = pytest.mark.parametrize(
    ("activation", "rms", "bias"), [("gelu", False, True), ("swiglu", True, False), ("squared-relu", True, False)]
)


def inputs(device="cpu"):
    x, delta, grad = (make("normal", (S, B, H), seed=seed, device=device).to(torch.bfloat16) for seed in (1, 2, 3))
    return x.requires_grad_(), delta.requires_grad_(), grad


def run(half, x, delta, grad, how):
    """The output, and the gradients of x, delta and all parameters."""
    out = MLPBlock.apply(x, delta, *half.arguments(), how)
    leaves = [t for t in (x, delta, *half.arguments()) if t is not None]
    return out.detach(), list(torch.autograd.grad(out, leaves, grad))


# dB of (output, gradient of x, least of the parameters' gradients); normal inputs, E4M3 forward and E5M2 backward.
LEAST_SQNR = (24.0, 20.0, 15.0)


@every_level
@every_activation
def test_is_the_function_of_torchs_own_operations(level, activation, rms, bias, device):
    half = mlp_half(level, device, activation, bias)
    x, delta, grad = inputs(device)
    out, grads = run(half, x, delta, grad, mlp_settings(half, activation, rms))
    plain = half.plain()
    total = (x.detach() + delta.detach()).double().requires_grad_()  # rounded as the block stores it
    want = plain_mlp(total, plain, activation, rms)
    leaves = {"x": total} | {k: v for k, v in plain.items() if v is not None}
    wanted = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()), grad.double()), strict=True))
    assert sqnr_db(want, out) > LEAST_SQNR[0]
    assert grads[0].equal(grads[1])
    assert sqnr_db(wanted["x"], grads[0]) > LEAST_SQNR[1]
    for (name, right), got in zip(list(wanted.items())[1:], grads[2:], strict=True):
        assert sqnr_db(right, got.float()) > LEAST_SQNR[2], name


@every_level
@every_activation
def test_recomputing_fc1_changes_no_bit_and_keeps_less(level, activation, rms, bias, device):
    half = mlp_half(level, device, activation, bias)
    x, delta, grad = inputs(device)
    found, kept = [], []
    for recompute in (False, True):
        found.append(run(half, x, delta, grad, mlp_settings(half, activation, rms, recompute=recompute)))
        out = MLPBlock.apply(x, delta, *half.arguments(), mlp_settings(half, activation, rms, recompute=recompute))
        kept.append(sum(t.nbytes for t in out.grad_fn.saved_tensors if t is not None and t.shape[:1] == (S * B,)))
    (out, kept_grads), (again, recomputed) = found
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(kept_grads, recomputed, strict=True))
    width = half.tensors["fc1"].shape[0]
    assert kept[0] - kept[1] == S * B * width * 2


@every_activation
@each_value(recompute=[False, True], kind=KINDS)
def test_inputs_kept_in_groups_change_no_output_and_little_of_the_gradients(kind, recompute, activation, rms, bias, device):
    half = mlp_half(recipe.O2, device, activation, bias)
    _, delta, grad = inputs(device)
    x = make(kind, (S, B, H), seed=1, device=device).bfloat16().requires_grad_()
    out, wanted = run(half, x, delta, grad, mlp_settings(half, activation, rms))
    kept, found = run(half, x, delta, grad, mlp_settings(half, activation, rms, saved=GroupedFP8(), recompute=recompute))
    assert kept.equal(out)
    least, margin = COAT_GRADIENTS["mlp"][KINDS.index(kind)], 3.0 if activation == "squared-relu" else 0.0  # a square doubles an error
    assert sqnr_db(wanted[0], found[0]) > least[0] - margin
    assert min(sqnr_db(want.float(), got.float()) for want, got in zip(wanted[2:], found[2:], strict=True)) > least[1] - margin


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_output_and_the_gradients(bad, device):
    half = mlp_half(recipe.O3, device)
    x, delta, grad = inputs(device)
    poisoned = grad.clone()
    poisoned[0, 0, 0] = bad
    _, grads = run(half, x, delta, poisoned, mlp_settings(half))
    assert not any(bool(g.isfinite().all()) for g in (grads[0], grads[4], grads[6]))
    with torch.no_grad():
        x[3, 1, 5] = bad
    out, _ = run(half, x, delta, grad, mlp_settings(half))
    assert not out.isfinite().all()


@every_activation
def test_watches_are_told_the_values_before_each_cast_and_change_no_bit(activation, rms, bias, device):
    half = mlp_half(recipe.O2, device, activation, bias)
    x, delta, grad = inputs(device)
    out, grads = run(half, x, delta, grad, mlp_settings(half, activation, rms))
    for scaling in half.scaling.values():
        scaling.amax.zero_()
    told = watch_casts(half)
    with torch.no_grad():
        MLPBlock.apply(x, delta, *half.arguments(), mlp_settings(half, activation, rms))
    assert not told  # an evaluation is nobody's business
    again, same = run(half, x, delta, grad, mlp_settings(half, activation, rms))
    check_casts(half, told)
    assert out.equal(again)
    assert all(a.equal(b) for a, b in zip(grads, same, strict=True))
