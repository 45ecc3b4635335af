"""The Triton amaxes and sums of squares bit for bit against their twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import KINDS, bits, make
from msamp.kernels.reference.grad_stats import grad_stats as twin
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor

SHAPES = [(17, 129), (32, 16), (), (0, 4), (3, 5, 7), (1,)]
every_float = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.grad_stats").grad_stats(*args, **flags)


def values(kind: str, device, shapes=SHAPES) -> list[torch.Tensor]:
    return [make(kind, shape or (1,), i).view(shape).clamp(-400, 400).to(device) * 2.0 ** (3 - i) for i, shape in enumerate(shapes)]


def assert_same(*args, **flags) -> None:
    for got, want in zip(kernel(*args, **flags), twin(*args, **flags), strict=True):
        assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
        assert bits(got).equal(bits(want))


@every_float
@pytest.mark.parametrize("kind", KINDS)
def test_plain_gradients(kind, dtype, triton_device):
    gs, tables = [x.to(dtype) for x in values(kind, triton_device)], Tables(torch.device(triton_device))
    assert_same(tables, gs, squares=False)
    factors = torch.tensor([1 / (1.1 * float(g.abs().max())) if g.numel() else 1.0 for g in gs], dtype=torch.float64, device=triton_device)
    assert_same(tables, gs, factors, [2 ** (46 - i) for i in range(len(gs))], squares=True)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_gradients_of_all_formats_at_once(kind, triton_device):
    formats = (E4M3, E4M3, E5M2, FP16, FP16, E4M3)
    gs = [ScalingTensor.quantize(x, fmt) for x, fmt in zip(values(kind, triton_device), formats, strict=True)]
    gs[1].scale_inv.fill_(0.3)
    assert_same(Tables(torch.device(triton_device)), gs)


def test_every_code_of_e4m3(triton_device):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].to(triton_device).view(E4M3.dtype)
    assert_same(Tables(torch.device(triton_device)), [ScalingTensor(finite, torch.ones((), device=triton_device))])


@every_value
@pytest.mark.parametrize("fmt", [None, E4M3, E5M2, FP16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_amax(bad, fmt, triton_device):
    x = make("normal", (8, 20), device=triton_device)
    x[7, 19] = bad
    gs = [x, x.bfloat16()] if fmt is None else [ScalingTensor.quantize(x, fmt)]
    if fmt is not None:
        x[7, 19] = float("nan")
        gs.append(ScalingTensor(x.to(fmt.dtype), torch.ones((), device=triton_device)))
    stats = kernel(Tables(torch.device(triton_device)), gs, squares=False)[0]
    assert stats[0].isposinf().all()
    assert bits(stats).equal(bits(twin(None, gs, squares=False)[0]))


def test_no_gradients(triton_device):
    assert [x.shape for x in kernel(Tables(torch.device(triton_device)), [])] == [(2, 0), (0, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [None, E4M3, E5M2, FP16], ids=str)
def test_large_tensors_on_the_gpu(fmt):
    gs = values("log-normal", "cuda", [(2048, 8192), (4096, 3001), (77,)])
    tables = Tables(gs[0].device)
    if fmt is not None:
        assert_same(tables, [ScalingTensor.quantize(g, fmt) for g in gs])
        return
    factors = torch.stack([1 / g.abs().max().double() for g in gs])
    assert_same(tables, gs, factors, [2**33] * 3, squares=True)
    assert_same(tables, [g.bfloat16() for g in gs], factors / 2, [2**33] * 3, squares=True)
