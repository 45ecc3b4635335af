"""The FP8 GEMM against the FP64 product of the values that its operands stand for."""

import warnings

import pytest
import torch
from numerics import make

from msamp.kernels import scaled_mm as module
from msamp.kernels.scaled_mm import _padded, emulated_mm, fp8_hardware, scaled_mm, warn_if_emulated
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.tensor import ScalingTensor

PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# Of the largest magnitude of the output: one rounding to it, and for the sum FP32's (hardware keeps a few bits less).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operand(shape: tuple[int, int], fmt, seed: int, device) -> ScalingTensor:
    return ScalingTensor.quantize(make("normal", shape, seed=seed, device=device) * 3.0, fmt)


def product(a: ScalingTensor, b: ScalingTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    return out if bias is None else out + bias.double()


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"off by {error:.2e} of the largest value, at most {tolerance:.2e}"


@pytest.mark.parametrize("shape", [(16, 16, 16), (17, 33, 5), (1, 16, 48), (40, 7, 100), (64, 128, 96), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_the_product_in_fp64(shape, pair, out_dtype, with_bias, device):
    (M, N, K), (fa, fb) = shape, pair
    a, b = operand((M, K), fa, 1, device), operand((N, K), fb, 2, device)
    bias = make("normal", (N,), seed=3, device=device).to(out_dtype) if with_bias else None
    out = scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, bias, out_dtype, fast_accum=False)
    assert (out.shape, out.dtype, out.device) == ((M, N), out_dtype, a.device)
    assert out.is_contiguous()
    looser = 512 if fp8_hardware(a.device) and out_dtype == torch.float32 else 2 if with_bias else 1
    assert_close(out, product(a, b, bias), looser * TOLERANCE[out_dtype])


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32), (16, 32, 0)], ids=str)
def test_no_rows_no_columns_and_an_empty_sum(shape, device):
    M, N, K = shape
    one = torch.ones((), device=device)
    a, b = torch.zeros(M, K, device=device).to(E4M3.dtype), torch.zeros(N, K, device=device).to(E4M3.dtype)
    out = scaled_mm(a, b, one, one, None, torch.bfloat16, fast_accum=False)
    assert out.shape == (M, N)
    assert out.eq(0).all()


@pytest.mark.parametrize("shape", [(1, 1), (15, 33), (16, 48), (17, 16)], ids=str)
def test_padding_is_zeros_up_to_the_next_multiple_of_16(shape):
    x = make("normal", shape).to(E4M3.dtype)
    padded = _padded(x)
    assert padded.shape == tuple(-(-s // 16) * 16 for s in shape)
    assert padded.dtype == x.dtype
    assert padded[: shape[0], : shape[1]].float().equal(x.float())
    assert padded.float().abs().sum() == x.float().abs().sum()
    assert (padded is x) == (shape == (16, 48))


@pytest.mark.parametrize("wide", [True, False])
def test_emulation_is_the_same_with_and_without_native_bf16(wide, monkeypatch):
    monkeypatch.setattr(module, "native_bf16", lambda device: wide)
    a, b = operand((32, 64), E4M3, 1, "cpu"), operand((48, 64), E4M3, 2, "cpu")
    for dtype in (torch.bfloat16, torch.float32):
        assert_close(emulated_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, dtype), product(a, b), 2 * TOLERANCE[dtype])


def test_emulation_does_not_overflow_before_the_scales_come():
    a = torch.full((16, 16), 57344.0).to(E5M2.dtype)
    scale = torch.tensor(2.0**-14)
    out = emulated_mm(a, torch.full((16, 16), 448.0).to(E4M3.dtype), scale, scale, torch.float16)
    assert out.isfinite().all()


def test_a_cpu_has_no_fp8_and_is_not_warned_about():
    assert not fp8_hardware(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_emulated(torch.device("cpu"))


def test_a_gpu_without_fp8_is_told_what_is_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    for cached in (fp8_hardware, warn_if_emulated):
        cached.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"NVIDIA A100 \(compute capability 8\.0\) has no FP8.*GEMMs run in 16 or 32 bits.*train in BF16 .O0"
        ):
            warn_if_emulated(torch.device("cuda", 7))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_emulated(torch.device("cuda", 7))
    finally:
        for cached in (fp8_hardware, warn_if_emulated):
            cached.cache_clear()


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_hardware_is_asked_by_number(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    fp8_hardware.cache_clear()
    try:
        assert fp8_hardware(torch.device("cuda", 6))
    finally:
        fp8_hardware.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8192, 2048, 2048), (1000, 777, 333), (128, 6144, 8192)], ids=str)
def test_hardware_against_the_emulation(fast, pair, out_dtype, shape):
    (M, N, K), (fa, fb) = shape, pair
    a, b = operand((M, K), fa, 1, "cuda"), operand((N, K), fb, 2, "cuda")
    got = scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, None, out_dtype, fast_accum=fast)
    want = emulated_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, out_dtype)
    noise = (got.double() - want.double()).norm() / want.double().norm()
    assert noise < (4e-3 if fast or out_dtype == torch.bfloat16 else 1e-3), f"relative error {noise:.2e}"
