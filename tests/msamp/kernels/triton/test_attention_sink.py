"""The Triton kernels of attention's first token against their twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.agreement import assert_codes
from helpers.choices import each_once
from helpers.numerics import make
from msamp.kernels.reference import attention_sink as twin
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import quantize

SHARE = 1e-3  # of codes that may differ: a score is a sum, in another order
# sequence, batch, heads, groups, channels, whether the first query has no other key
SHAPES = [(150, 1, 2, 1, 128, True), (70, 2, 4, 2, 48, False), (5, 3, 2, 2, 16, True)]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # numpy


def kernel(name: str, *args, **flags):
    return getattr(importlib.import_module("msamp.kernels.triton.attention_sink"), name)(*args, **flags)


def drawn(shape, device):
    """query, o, lse, sink, scale_invs, softmax_scale as `sink_merge` takes them, and dO. The first token has most of some rows' weight."""
    s, b, heads, groups, d, first = shape
    query = quantize(make("normal", (s, b, heads, d), device=device), torch.tensor(8.0, device=device), E4M3).contiguous()
    o = quantize(make("normal", (s - first, b, heads, d), seed=1, device=device), torch.tensor(16.0, device=device), E4M3).contiguous()
    lse = make("normal", (b, heads, s - first, 1), seed=2, device=device)
    sink = make("normal", (3, b, groups, d), seed=3, device=device)
    sink[0] *= 3
    scale_invs = torch.tensor([1 / 8, 1 / 16], device=device)
    return (query, o, lse, sink, scale_invs, d**-0.5), make("normal", (s, b, heads, d), seed=4, device=device).bfloat16()


@each_once(shape=SHAPES, dtype=[torch.bfloat16, torch.float32], rotated=[0, 8, 16])
def test_means_and_the_first_token(shape, dtype, rotated, triton_device):
    s, b, _, groups, d, first = shape
    packed = make("normal", (s, b, groups, 3 * d), device=triton_device).to(dtype) + 1
    key, value = packed[..., :d], packed[..., d : 2 * d]
    cos, sin = (make("normal", (s, rotated), seed=n, device=triton_device) for n in (1, 2))
    got, want = kernel("attention_sink", key, value, cos, sin, int(first)), twin.attention_sink(key, value, cos, sin, int(first))
    torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-6)  # one rounding, of a product that a GPU contracts
    assert got[1].equal(want[1])
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=1e-6)
    codes, scale_inv = (
        quantize(value, torch.tensor(32.0, device=triton_device), E4M3).contiguous(),
        torch.tensor(1 / 32, device=triton_device),
    )
    kernel("sink_center_", got, codes, scale_inv, int(first))
    twin.sink_center_(want, codes, scale_inv, int(first))
    torch.testing.assert_close(got[2], want[2], rtol=1e-3, atol=1e-6)
    assert want[2].abs().amax() < 0.1


@each_once(shape=SHAPES, scale=[None, 16.0], dtype=[E4M3.dtype, torch.bfloat16])
def test_merge(shape, scale, dtype, triton_device):
    given, _ = drawn(shape, triton_device)
    scales = None if scale is None else torch.tensor(scale, device=triton_device)
    slots = [torch.tensor(0.25, device=triton_device) for _ in range(2)]
    got, scale_inv = kernel("sink_merge", *given, scales, slots[0], dtype)
    want, wanted = twin.sink_merge(*given, scales, slots[1], dtype)
    assert scale_inv.equal(wanted)
    torch.testing.assert_close(*slots, rtol=1e-4, atol=1e-6)
    if dtype.itemsize == 1:
        assert_codes(got.flatten(0, 1).flatten(1), want.flatten(0, 1).flatten(1), SHARE)
    else:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-4)
    if shape[-1]:  # the first query attends to the first token alone
        repeats = given[0].shape[2] // given[3].shape[2]
        torch.testing.assert_close(twin.sink_merge(*given, None, None, torch.float32)[0][0], given[3][1].repeat_interleave(repeats, 1))


@each_once(shape=SHAPES, scale=[None, 64.0], again=[True, False])
def test_backward(shape, scale, again, triton_device):
    given, grad = drawn(shape, triton_device)
    scales = None if scale is None else torch.tensor(scale, device=triton_device)
    slots = [torch.tensor(0.25, device=triton_device) for _ in range(2)]
    value, output = torch.tensor(1 / 64, device=triton_device), torch.tensor(1 / 32, device=triton_device) if again else None
    got = kernel("sink_backward", grad, *given, scales, slots[0], E5M2.dtype, value, output)
    want = twin.sink_backward(grad, *given, scales, slots[1], E5M2.dtype, value, output)
    torch.testing.assert_close(*slots, rtol=1e-4, atol=1e-6)
    assert got[4].equal(want[4])
    for a, b in zip(got[:3], want[:3], strict=True):
        assert a.shape == b.shape
        if not a.numel():
            continue
        assert_codes(a.flatten(0, 1).flatten(1), b.flatten(0, 1).flatten(1), SHARE)
    torch.testing.assert_close(got[3], want[3], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[5].sum(0), want[5].sum(0), rtol=1e-3, atol=1e-3)
    wide = kernel("sink_backward", grad, *given, None, None, torch.bfloat16, value, output)[0]  # as a watch takes it
    torch.testing.assert_close(wide, twin.sink_backward(grad, *given, None, None, torch.bfloat16, value, output)[0], rtol=2**-7, atol=1e-4)


def test_what_is_not_finite_is_seen(triton_device):
    given, grad = drawn(SHAPES[0], triton_device)
    grad[3, 0, 0, 0] = float("inf")
    one, slot = torch.ones((), device=triton_device), torch.zeros((), device=triton_device)
    got = kernel("sink_backward", grad, *given, one, slot, E5M2.dtype, one, None)
    assert slot.isinf()
    assert got[4].isnan()
    given[3][1, 0, 0, 0] = float("nan")
    slot.zero_()
    assert kernel("sink_merge", *given, one, slot, E4M3.dtype)[1].isnan()
    assert slot.isinf()
