"""The definition of FP8 attention against attention in FP64, by all three measures."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.numerics import ATTENTION_GRADIENTS, KINDS, check, make, measure
from msamp.kernels.reference.fp8_attention import AttentionScales, attention_backward, attention_forward
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

S, B, HEADS, GROUPS, D = 64, 2, 4, 2, 32
SHAPE = (S, HEADS, D)
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantized(x: torch.Tensor, fmt) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_from_amax(x.abs().amax(), fmt.max)
    return quantize(x, scale, fmt), inverse(scale)


def inputs(kind: str, groups: int = GROUPS) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient: scores of moderate size, the value of the kind."""
    q, k, v, grad = (make(kind, (S, B, n, D), seed=i) for i, n in enumerate((HEADS, groups, groups, HEADS)))
    return [q / q.square().mean().sqrt(), k / k.square().mean().sqrt(), v, grad]


def exact(q, k, v, grad, causal: bool) -> tuple[torch.Tensor, ...]:
    """Output and gradients in FP64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    by_head = [x.permute(1, 2, 0, 3) for x in leaves]
    out = scaled_dot_product_attention(*by_head, is_causal=causal, enable_gqa=True).permute(2, 0, 1, 3)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def fp8(q, k, v, grad, causal: bool):
    """Payload, values and gradients by the definition, each scale just in time."""
    made = [quantized(x, E4M3) for x in (q, k, v)]
    codes, scale_invs = [x for x, _ in made], torch.stack([s for _, s in made])
    factor = 1 / math.sqrt(D)
    _, _, amax = attention_forward(*codes, scale_invs, torch.ones(()), factor, causal=causal)
    scale = scale_from_amax(amax, E4M3.max)
    o, stats, again = attention_forward(*codes, scale_invs, scale, factor, causal=causal)
    assert again == amax
    grad8, grad_scale_inv = quantized(grad, E5M2)
    scales = torch.ones(4)
    for _ in range(3):  # the amaxes of dQ and dK follow from the codes of dP
        given = AttentionScales(scale_invs, inverse(scale), grad_scale_inv, scales, inverse(scales[0]))
        *gradients, amaxes = attention_backward(*codes, o, grad8, stats, given, factor, causal=causal)
        used, scales = scales, scale_from_amax(amaxes, E5M2.max)
    return o, dequantize(o, inverse(scale)), [dequantize(g, 1 / s) for g, s in zip(gradients, used[1:], strict=True)]


@every_kind
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_output_and_gradients_against_fp64(kind, causal):
    given = inputs(kind)
    want, *wanted = exact(*given, causal)
    payload, out, gradients = fp8(*given, causal)
    check("attention", "fp8-e4m3", kind, SHAPE, measure(want.float(), out, payload, E4M3))
    least = ATTENTION_GRADIENTS[KINDS.index(kind)]
    found = [sqnr_db(right.float(), got) for right, got in zip(wanted, gradients, strict=True)]
    assert all(a > b for a, b in zip(found, least, strict=True)), (found, least)


def test_a_scale_that_is_too_large_saturates():
    q, k, v, _ = inputs("normal")
    made = [quantized(x, E4M3) for x in (q, k, v)]
    codes, scale_invs = [x for x, _ in made], torch.stack([s for _, s in made])
    o, _, amax = attention_forward(*codes, scale_invs, torch.tensor(2.0**20), 0.2, causal=True)
    assert o.float().abs().amax() == E4M3.max
    assert amax < 10


def test_what_is_not_finite_reaches_output_and_gradients():
    q, k, v, grad = inputs("normal")
    made = [quantized(x, E4M3) for x in (q, k, v)]
    codes, scale_invs = [x for x, _ in made], torch.stack([s for _, s in made])
    scale_invs[2] = float("nan")  # as a cast leaves it
    o, stats, amax = attention_forward(*codes, scale_invs, torch.ones(()), 0.2, causal=True)
    assert o.float().isnan().all()
    assert amax.isinf()
    scales = AttentionScales(scale_invs, torch.ones(()), torch.ones(()), torch.ones(4), torch.ones(()))
    dq, _, _, amaxes = attention_backward(*codes, o, grad.to(torch.float8_e5m2), stats, scales, 0.2, causal=True)
    assert dq.float().isnan().all()
    assert amaxes[:3].isinf().all()


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, _ = (x.to(torch.float8_e4m3fn) for x in inputs("normal"))
    with pytest.raises(ValueError, match=r"value \(64, 2, 1, 32\); for a query of \(64, 2, 4, 32\)"):
        attention_forward(q, k, v[:, :, :1], torch.ones(3), torch.ones(()), 1.0, causal=True)
    with pytest.raises(ValueError, match=r"key is \(64, 2, 3, 32\)"):
        attention_forward(q, q[:, :, :3], q[:, :, :3], torch.ones(3), torch.ones(()), 1.0, causal=True)
    with pytest.raises(ValueError, match=r"key is \(32, 2, 2, 32\), .* both must be \[64, 2, groups, 32\]"):
        attention_forward(q, k[:32], v[:32], torch.ones(3), torch.ones(()), 1.0, causal=True)
    o, stats, _ = attention_forward(q, k[:32], v[:32], torch.ones(3), torch.ones(()), 1.0, causal=False)
    assert (o.shape, stats.shape) == (q.shape, (2, 4, 64, 1))
