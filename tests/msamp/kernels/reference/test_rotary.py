"""The rotary embedding against megatron-core and, as a gradient, against autograd in FP64."""

import pytest
import torch

from helpers.agreement import assert_no_worse
from helpers.numerics import KINDS, bits, codes, make
from msamp.kernels.reference.rotary import rotary_, rotary_backward
from msamp.numerics.formats import E5M2
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse

# sequence, batch, heads, groups, channels of a head, of them rotated
SHAPES = [(5, 2, 4, 4, 16, 16), (6, 3, 4, 2, 12, 6), (3, 1, 6, 1, 8, 8), (4, 2, 2, 2, 6, 0)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def split(qkv: torch.Tensor, heads: int, groups: int) -> list[torch.Tensor]:
    """Query, key and value of a packed projection, each [s, b, n, d]."""
    grouped = qkv.unflatten(2, (groups, heads // groups + 2, -1))
    return [part.flatten(2, 3) for part in grouped.split([heads // groups, 1, 1], dim=3)]


def tables(s: int, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """No angles: four different tables, so that a wrong half or sign shows."""
    return make("normal", (s, r), seed=1), make("normal", (s, r), seed=2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The formula, channel by channel."""
    r = cos.shape[1]
    out = [x[..., i] for i in range(x.shape[-1])]
    for i in range(r // 2):
        j = i + r // 2
        out[i] = x[..., i] * cos[:, None, None, i] - x[..., j] * sin[:, None, None, i]
        out[j] = x[..., j] * cos[:, None, None, j] + x[..., i] * sin[:, None, None, j]
    return torch.stack(out, dim=-1)


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_turn_and_values_stay(shape, dtype):
    s, b, heads, groups, d, r = shape
    qkv = make("normal", (s, b, (heads + 2 * groups) * d)).to(dtype)
    cos, sin = tables(s, r)
    query, key, value = split(qkv.double(), heads, groups)
    got = qkv.clone()
    rotary_(got, cos, sin, heads, groups)
    for part, want in zip(split(got, heads, groups), (rotated(query, cos, sin), rotated(key, cos, sin), value), strict=True):
        torch.testing.assert_close(part.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_it_is_megatron_s():
    rope = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    s, b, heads, d, r = 7, 2, 3, 16, 8
    qkv = make("normal", (s, b, 3 * heads * d))
    angles = torch.outer(torch.arange(s), 100.0 ** (-torch.arange(r // 2) / 4))
    angles = torch.cat([angles, angles], dim=1)
    query, key, value = split(qkv, heads, heads)
    want = [rope._apply_rotary_pos_emb_bshd(part, angles[:, None, None]) for part in (query, key)]
    rotary_(qkv, angles.cos(), angles.sin(), heads, heads)
    for got, expected in zip(split(qkv, heads, heads), (*want, value), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@every_shape
def test_the_gradient_is_autograd_s(shape):
    s, b, heads, groups, d, r = shape
    cos, sin = tables(s, r)
    qkv = make("normal", (s, b, (heads + 2 * groups) * d)).double().requires_grad_()
    query, key, value = split(qkv, heads, groups)
    grads = [make("normal", (s, b, n, d), seed=seed) for n, seed in ((heads, 3), (groups, 4), (groups, 5))]
    outputs = [rotated(query, cos.double(), sin.double()), rotated(key, cos.double(), sin.double()), value]
    (want,) = torch.autograd.grad(outputs, qkv, [g.double() for g in grads])
    g, g_t, scale_inv, sums = rotary_backward(*grads, cos, sin, None, None, torch.float32, colsum=True)
    torch.testing.assert_close(g.double(), want.view(s * b, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.double().sum(0), want.view(s * b, -1).sum(0), rtol=1e-5, atol=1e-5)
    assert (g_t.numel(), scale_inv.numel()) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_quantised_gradient_loses_what_one_rounding_loses(kind):
    grads = [make(kind, (16, 2, 4, 16), seed=seed).bfloat16() for seed in (3, 4, 5)]
    cos, sin = tables(16, 16)
    want, slot = rotary_backward(*grads, cos, sin, None, None, torch.float32)[0], torch.zeros(())
    g, g_t, scale_inv, _ = rotary_backward(*grads, cos, sin, None, slot, E5M2.dtype)
    assert_no_worse(want, g, scale_inv, E5M2, quantize(want, inverse(scale_inv), E5M2))
    assert codes(g_t).equal(codes(g).t())
    assert slot == want.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    grads = [make("normal", (4, 2, 2, 8), seed=seed) for seed in (3, 4, 5)]
    grads[2][1, 1, 1, 1] = bad
    slot = torch.zeros(())
    assert rotary_backward(*grads, *tables(4, 8), torch.ones(()), slot, E5M2.dtype)[2].isnan()
    assert slot.isinf()


def test_permuted_views_are_taken_as_they_are():
    stored = [make("normal", (2, 4, 5, 8), seed=seed) for seed in (3, 4, 5)]
    views = [t.permute(2, 0, 1, 3) for t in stored]
    got = rotary_backward(*views, *tables(5, 8), None, None, torch.float32)[0]
    assert bits(got).equal(bits(rotary_backward(*[v.contiguous() for v in views], *tables(5, 8), None, None, torch.float32)[0]))


def test_what_does_not_fit_is_refused():
    qkv, cos = torch.zeros(4, 2, 48), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="3 heads cannot be divided into 2 query groups; heads must be a multiple"):
        rotary_(qkv, cos, cos, 3, 2)
    with pytest.raises(ValueError, match=r"qkv is \(4, 2, 48\); it must be \[sequence, batch, 15 x d\]"):
        rotary_(qkv, cos, cos, 5, 5)
    with pytest.raises(ValueError, match=r"sin is \(4, 6\); it must be \[4, r\]"):
        rotary_(qkv, cos, cos[:, :6], 2, 2)
    with pytest.raises(ValueError, match=r"cos is \(3, 8\); it must be \[4, r\] with r even and at most the 8 channels"):
        rotary_(qkv, cos[:3], cos[:3], 2, 2)
