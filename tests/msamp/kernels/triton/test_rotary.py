"""The Triton rotary embedding against its twin: under the interpreter here, compiled on a GPU, where products are contracted."""

import functools
import importlib
import itertools

import pytest
import torch

from helpers.agreement import assert_codes, assert_plain, assert_sums
from helpers.choices import each_once
from helpers.numerics import bits, codes, make
from msamp.kernels.reference import rotary as twin
from msamp.numerics.formats import E4M3, E5M2

SHARE = 1e-4
# sequence, batch, heads, groups, channels of a head, of them rotated
SHAPES = [(5, 2, 2, 2, 16, 16), (9, 4, 4, 2, 12, 6), (35, 1, 2, 1, 80, 80), (3, 3, 1, 1, 6, 0), (17, 2, 1, 1, 96, 24)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter
every_scale = pytest.mark.parametrize("scale", [None, 2.0])


def kernel(name: str, *args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.rotary"), name)(*args, **flags)


def tables(s: int, r: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    return make("normal", (s, r), seed=1, device=device), make("normal", (s, r), seed=2, device=device)


def gradients(shape, device, dtype=torch.bfloat16, kind="normal") -> list[torch.Tensor]:
    """dq, dk, dv as three kinds of views that attention's backward gives."""
    s, b, heads, groups, d, _ = shape
    dq = make(kind, (b, heads, s, d), seed=3, device=device).to(dtype).permute(2, 0, 1, 3)
    dk = make(kind, (b, s, groups, d), seed=4, device=device).to(dtype).transpose(0, 1)
    dv = make(kind, (s, b, groups, 2 * d), seed=5, device=device).to(dtype)[..., :d]
    return [dq, dk, dv]


def assert_same_backward(grads: list[torch.Tensor], r: int, scale: float | None, fmt=E5M2, scale_invs=None) -> None:
    device = grads[0].device
    cos, sin = tables(grads[0].shape[0], r, device)
    scale_t = None if scale is None else torch.tensor(scale, device=device)
    slots = [torch.tensor(0.25, device=device) for _ in range(2)]
    g, g_t, scale_inv, sums = kernel("rotary_backward", *grads, cos, sin, scale_t, slots[0], fmt.dtype, colsum=True, scale_invs=scale_invs)
    want = twin.rotary_backward(*grads, cos, sin, scale_t, slots[1], fmt.dtype, colsum=True, scale_invs=scale_invs)
    assert_codes(g, want[0], SHARE)
    assert (g_t.shape, g_t.is_contiguous()) == (g.shape[::-1], True)
    assert codes(g_t).equal(codes(g).t())
    assert scale_inv.equal(want[2])
    torch.testing.assert_close(*slots, rtol=1e-6, atol=0.0)
    plain = twin.rotary_backward(*grads, cos, sin, None, None, torch.float32, scale_invs=scale_invs)[0]
    assert_sums(sums.sum(0), want[3].sum(0), plain.abs().sum(0) + 1.0)


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, itertools.cycle(DTYPES), strict=False)), ids=str)
def test_in_place(shape, dtype, triton_device):
    s, b, heads, groups, d, r = shape
    qkv = make("normal", (s, b, (heads + 2 * groups) * d), device=triton_device).to(dtype)
    cos, sin = tables(s, r, triton_device)
    got, want = qkv.clone(), qkv.clone()
    assert kernel("rotary_", got, cos, sin, heads, groups) is None
    twin.rotary_(want, cos, sin, heads, groups)
    assert_plain(got, want, terms=torch.full_like(want, 50.0))
    values = got.view(s, b, groups, -1, d)[:, :, :, -1], qkv.view(s, b, groups, -1, d)[:, :, :, -1]
    assert bits(values[0]).equal(bits(values[1]))


@each_once(shape=SHAPES, scales=[None, (2.0, 0.5, 8.0)], fmt=[E4M3, E5M2])
def test_into_fp8(shape, scales, fmt, triton_device):
    s, b, heads, groups, d, r = shape
    qkv = make("normal", (s, b, (heads + 2 * groups) * d), device=triton_device).to(torch.bfloat16)
    given = None if scales is None else torch.tensor(scales, device=triton_device)
    slots = [torch.full((3,), 0.25, device=triton_device) for _ in range(2)]
    before, angles = qkv.clone(), tables(s, r, triton_device)
    *got, scale_invs = kernel("rotary_cast", qkv, *angles, heads, groups, given, slots[0], fmt.dtype)
    *want, wanted = twin.rotary_cast(qkv, *angles, heads, groups, given, slots[1], fmt.dtype)
    for mine, theirs in zip(got, want, strict=True):
        assert_codes(mine, theirs, SHARE)
    assert scale_invs.equal(wanted)
    torch.testing.assert_close(*slots, rtol=1e-2, atol=0.0)  # an amax rounded to BF16 may be the next
    for run in (functools.partial(kernel, "rotary_cast"), twin.rotary_cast):
        left = torch.zeros(3, device=triton_device)
        *again, none = run(qkv, *angles, heads, groups, given, None, fmt.dtype, scale_inv_slots=left)
        assert left.equal(wanted)
        assert none.shape == (0,)
        assert all(codes(x).equal(codes(y)) for x, y in zip(again, got if run is not twin.rotary_cast else want, strict=True))
    assert bits(qkv).equal(bits(before))


@pytest.mark.parametrize("scales", [None, 2.0])
def test_into_fp8_what_is_not_finite_shows(scales, triton_device):
    given = None if scales is None else torch.full((3,), scales, device=triton_device)
    for which, head in enumerate((1, 2, 3)):  # of two queries, a key and a value in each group
        qkv = torch.ones(9, 2, 8 * 16, device=triton_device)
        qkv[5, 1, (4 + head) * 16 + 3] = float("inf")
        slots = torch.zeros(3, device=triton_device)
        scale_invs = kernel("rotary_cast", qkv, *tables(9, 0, triton_device), 4, 2, given, slots, E4M3.dtype)[3]
        assert scale_invs.isnan().tolist() == slots.isinf().tolist() == [which == i for i in range(3)]


@pytest.mark.parametrize(("shape", "scale"), [(SHAPES[0], None), (SHAPES[3], 2.0)], ids=str)
def test_gradients_in_e5m2_with_their_factors(shape, scale, triton_device):
    factors = torch.tensor([0.5, 4.0, 2.0], device=triton_device)
    grads = [(100 * t.float()).to(torch.float8_e5m2) for t in gradients(shape, triton_device)]
    assert_same_backward(grads, shape[-1], scale, scale_invs=factors)
    values = [t.float() * factor for t, factor in zip(grads, factors, strict=True)]
    angles, scale_t = tables(shape[0], shape[-1], triton_device), None if scale is None else torch.tensor(scale, device=triton_device)
    got = kernel("rotary_backward", *grads, *angles, scale_t, None, E5M2.dtype, scale_invs=factors)
    assert_codes(got[0], kernel("rotary_backward", *values, *angles, scale_t, None, E5M2.dtype)[0], SHARE)


@each_once(shape=SHAPES, scale=[None, 2.0])
def test_gradients_of_any_strides(shape, scale, triton_device):
    assert_same_backward(gradients(shape, triton_device), shape[-1], scale)


@every_dtype
def test_plain_gradients(dtype, triton_device):
    grads, slot = gradients((9, 2, 4, 2, 16, 8), triton_device, dtype), torch.zeros((), device=triton_device)
    g, g_t, scale_inv, sums = kernel("rotary_backward", *grads, *tables(9, 8, triton_device), None, slot, dtype, colsum=True)
    want = twin.rotary_backward(*grads, *tables(9, 8, triton_device), None, None, dtype, colsum=True)
    assert_plain(g, want[0], terms=torch.full_like(want[0], 50.0))
    assert_sums(sums.sum(0), want[3].sum(0), torch.full_like(want[3].sum(0), 50.0))
    assert (g_t.numel(), scale_inv.numel(), float(slot)) == (0, 0, 0.0)


@pytest.mark.parametrize(("scale", "bad"), [(None, float("nan")), (2.0, float("inf"))])
def test_what_is_not_finite_shows(scale, bad, triton_device):
    scale = None if scale is None else torch.tensor(scale, device=triton_device)
    for which in range(3):
        grads = gradients((9, 2, 1, 1, 16, 8), triton_device)
        grads[which][5 + which, 1, 0, -1] = bad
        slot = torch.zeros((), device=triton_device)
        assert kernel("rotary_backward", *grads, *tables(9, 8, triton_device), scale, slot, E5M2.dtype)[2].isnan()
        assert slot.isinf()


def test_channels_that_are_not_contiguous_and_no_tokens(triton_device):
    grads = gradients((9, 2, 4, 2, 16, 16), triton_device)
    assert_same_backward([t.transpose(2, 3).contiguous().transpose(2, 3) for t in grads], 16, 2.0)
    assert_same_backward([t[:0] for t in grads], 16, 2.0)
    empty = torch.empty(0, 2, 48, device=triton_device)
    kernel("rotary_", empty, *tables(0, 8, triton_device), 2, 2)


@pytest.mark.gpu
@every_scale
@pytest.mark.parametrize("shape", [(2048, 4, 16, 16, 128, 128), (2048, 2, 32, 8, 128, 32), (1021, 3, 12, 12, 64, 64)], ids=str)
def test_large_on_the_gpu(scale, shape):
    s, b, heads, groups, d, r = shape
    assert_same_backward(gradients(shape, "cuda"), r, scale)
    qkv = torch.randn(s, b, (heads + 2 * groups) * d, device="cuda").bfloat16()
    given = None if scale is None else torch.full((3,), scale, device="cuda")
    cast, angles = [heads, groups, given, None, E4M3.dtype], tables(s, r, "cuda")
    for mine, theirs in zip(kernel("rotary_cast", qkv, *angles, *cast)[:3], twin.rotary_cast(qkv, *angles, *cast)[:3], strict=True):
        assert_codes(mine, theirs, 1e-3)
    got, want = qkv.clone(), qkv.clone()
    kernel("rotary_", got, *tables(s, r, "cuda"), heads, groups)
    twin.rotary_(want, *tables(s, r, "cuda"), heads, groups)
    assert_plain(got, want, terms=torch.full_like(want, 50.0))


@each_once(shape=SHAPES, dtype=DTYPES, rows=["positions", "tokens"], fmt=[E4M3, E5M2])
def test_queries_keys_and_values_apart(shape, dtype, rows, fmt, triton_device):
    b, s, heads, groups, d, r = shape
    angles = [table.to(dtype) for table in tables(s if rows == "positions" else b * s, r, triton_device)]
    qkv = make("normal", (b, s, (heads + 2 * groups) * d), device=triton_device).to(dtype)
    got, want = qkv.clone(), qkv.clone()
    assert kernel("rotary_", got, *angles, heads, groups, apart=True) is None
    twin.rotary_(want, *angles, heads, groups, apart=True)
    assert_plain(got, want, terms=torch.full_like(want, 50.0))
    grads = [make("normal", (b, n, s, d), seed=n, device=triton_device).to(dtype).transpose(1, 2) for n in (heads, groups, groups)]
    scale = torch.tensor(2.0, device=triton_device)
    g, g_t, scale_inv, sums = kernel("rotary_backward", *grads, *angles, scale, None, fmt.dtype, colsum=True, apart=True)
    wanted = twin.rotary_backward(*grads, *angles, scale, None, fmt.dtype, colsum=True, apart=True)
    assert_codes(g, wanted[0], SHARE)
    assert codes(g_t).equal(codes(g).t())
    assert scale_inv.equal(wanted[2])
    torch.testing.assert_close(sums.sum(0), wanted[3].sum(0), rtol=1e-4, atol=1e-3)


def test_apart_is_the_packed_layout_in_another_order():
    s, b, heads, groups, d, r = 5, 3, 4, 2, 8, 6
    cos, sin = tables(s, r, "cpu")
    qkv = make("normal", (s, b, (heads + 2 * groups) * d))
    grouped = qkv.view(s, b, groups, heads // groups + 2, d)
    apart = torch.cat([grouped[:, :, :, :-2].flatten(2), grouped[:, :, :, -2].flatten(2), grouped[:, :, :, -1].flatten(2)], -1)
    apart = apart.transpose(0, 1).contiguous()
    twin.rotary_(qkv, cos, sin, heads, groups)
    twin.rotary_(apart, cos, sin, heads, groups, apart=True)
    assert apart[..., : heads * d].transpose(0, 1).reshape(s, b, groups, -1, d).equal(grouped[:, :, :, :-2])
    assert apart[..., heads * d : (heads + groups) * d].transpose(0, 1).reshape(s, b, groups, d).equal(grouped[:, :, :, -2])
