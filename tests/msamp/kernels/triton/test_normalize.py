"""The Triton norms against their twins: under the interpreter here, compiled on a GPU.

The statistics are sums in another order, so they agree to FP32 rounding and a code may be the neighbouring one. From the same statistics
everything that is written is bit for bit the same.
"""

import functools
import importlib

import pytest
import torch

from helpers.choices import each_once, every_pair
from helpers.numerics import bits, codes, make
from msamp.kernels.reference import normalize as twin
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import TENSORWISE

EPS = 1e-5
both_norms = pytest.mark.parametrize("rms", [False, True], ids=["layer-norm", "rms-norm"])
every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ragged = each_once(shape=[(1, 1), (3, 5), (130, 64), (37, 200), (7, 1025), (2, 5000)], rms=[False, True])


def kernel(name: str, *args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return getattr(importlib.import_module("msamp.kernels.triton.normalize"), name)(*args, **flags)


def parameters(n: int, rms: bool, device, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = (1.0 + 0.2 * make("normal", (n,), seed=1, device=device)).to(dtype)
    return weight, None if rms else (0.1 * make("normal", (n,), seed=2, device=device)).to(dtype)


def assert_close_codes(got: torch.Tensor, want: torch.Tensor, share: float = 1e-4) -> None:
    """The same but for a small share of neighbouring codes; -0 and 0 count as one.

    Where the bias cancels a value, its last bit is worth more than one code: 1 in 10 million was seen 4 codes apart on an H200.
    """
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    ordered = [(code & 0x7F) * (1 - (code >> 7) * 2) for code in (codes(got), codes(want))]
    apart = (ordered[0] - ordered[1]).abs()
    assert (apart > 1).sum() <= 1e-6 * apart.numel()
    assert (apart > 0).sum() <= max(2, share * apart.numel())


def assert_same_forward(x, residual, rms, scale, dtype, slot=0.25, kind_of_weight=torch.float32) -> None:
    weight, bias = parameters(x.shape[1], rms, x.device, kind_of_weight)
    scale = None if scale is None else torch.tensor(scale, device=x.device)
    slots = [None if slot is None else torch.tensor(slot, device=x.device) for _ in range(2)]
    results = []
    for function, own in ((functools.partial(kernel, "normalize"), slots[0]), (twin.normalize, slots[1])):
        results.append(function(x, residual, weight, bias, EPS, scale, own, dtype, rms=rms))
    (total, y, scale_inv, mean, rstd), want = results
    for g, w in zip(results[0], want, strict=True):
        assert (g.dtype, g.shape, g.device) == (w.dtype, w.shape, w.device)
    assert bits(total).equal(bits(want[0]))
    assert scale_inv.equal(want[2])
    if dtype.itemsize == 1:
        told = torch.zeros((), device=x.device)
        assert kernel("normalize", x, residual, weight, bias, EPS, scale, None, dtype, rms=rms, scale_inv_slot=told)[2].numel() == 0
        assert told.equal(scale_inv)
    torch.testing.assert_close(mean, want[3], rtol=1e-5, atol=1e-5 * float(x.float().abs().mean()))
    torch.testing.assert_close(rstd, want[4], rtol=1e-5, atol=0.0)
    if dtype.itemsize == 1:
        assert_close_codes(y, want[1])
        if slot is not None:
            torch.testing.assert_close(slots[0], slots[1], rtol=1e-5, atol=0.0)
        source = x if residual is None else total
        y_t = kernel("normalize_transposed", source, mean, rstd, weight, bias, scale_inv, dtype, rms=rms)
        assert y_t.is_contiguous()
        again = twin.normalize_transposed(source, mean, rstd, weight, bias, scale_inv, dtype, rms=rms)
        # A width that is no multiple of 8 is no GEMM operand as it is; there 3 codes of 12 million were neighbours on an H200.
        allowed = 0 if x.shape[1] % 8 == 0 or not x.is_cuda else 1e-6 * y.numel()
        assert (codes(y_t) != codes(y).t()).sum() <= allowed, "backward computes the very codes of forward"
        assert (codes(y_t) != codes(again)).sum() <= allowed
    else:
        torch.testing.assert_close(y, want[1], rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@ragged
def test_ragged_shapes(shape, rms, triton_device):
    x, residual = (make("normal", shape, seed=seed, device=triton_device).bfloat16() for seed in (0, 3))
    assert_same_forward(x, residual, rms, 8.0, E4M3.dtype)


@each_once(dtype=DTYPES, fmt=[E4M3, E5M2])
@both_norms
def test_every_format(dtype, fmt, rms, triton_device):
    x, residual = (make("normal", (70, 96), seed=seed, device=triton_device).to(dtype) for seed in (0, 3))
    assert_same_forward(x, residual, rms, None, fmt.dtype, kind_of_weight=dtype)


@pytest.mark.parametrize("kind", ["channel-outlier", "log-normal"])
@pytest.mark.parametrize("scale", [None, 2.0**-20, 4.0])
def test_other_kinds_alone_and_without_a_slot(kind, scale, triton_device):
    assert_same_forward(make(kind, (70, 96), device=triton_device), None, False, scale, E4M3.dtype, slot=None)


@every_dtype
@both_norms
def test_plain_output(dtype, rms, triton_device):
    x = make("normal", (70, 96), device=triton_device).bfloat16()
    assert_same_forward(x, x, rms, None, dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad, scale, triton_device):
    x = make("normal", (130, 70), device=triton_device)
    x[129, 69] = bad
    weight, bias = parameters(70, False, triton_device)
    slot, scale = torch.tensor(0.5, device=triton_device), None if scale is None else torch.tensor(scale, device=triton_device)
    _, y, scale_inv, *_ = kernel("normalize", x, None, weight, bias, EPS, scale, slot, E4M3.dtype, rms=False)
    assert scale_inv.isnan()
    assert slot == float("inf")
    assert y[129].float().isnan().all()
    assert y[:129].float().isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@both_norms
@every_fp8
def test_infinities_saturate(rms, fmt, triton_device):
    x, weight = torch.ones(4, 64, device=triton_device), torch.ones(64, device=triton_device)
    x[:, 1::2], weight[3], weight[4] = -1.0, float("inf"), 1e30
    scale = torch.tensor(2.0, device=triton_device)
    _, y, scale_inv, mean, rstd = kernel("normalize", x, None, weight, None, EPS, scale, None, fmt.dtype, rms=rms)
    assert scale_inv.isnan()
    assert (y[:, 3].float() == -fmt.max).all()
    assert (y[:, 4].float() == fmt.max).all()
    assert codes(kernel("normalize_transposed", x, mean, rstd, weight, None, 1 / scale, fmt.dtype, rms=rms)).equal(codes(y).t())


def test_strided_input_and_no_rows(triton_device):
    assert_same_forward(make("normal", (64, 96), device=triton_device).t(), None, False, 8.0, E4M3.dtype)
    x, (weight, bias) = torch.empty(0, 16, device=triton_device), parameters(16, False, triton_device)
    scale = torch.tensor(4.0, device=triton_device)
    _, y, scale_inv, mean, rstd = kernel("normalize", x, x, weight, bias, EPS, scale, None, E4M3.dtype, rms=False)
    assert (y.shape, scale_inv) == ((0, 16), 0.25)
    grad_x, grad_weight, grad_bias, maxima = kernel("normalize_backward", x, x, mean, rstd, weight, None, rms=False, maxima=True)
    assert (grad_x.shape, float(maxima)) == ((0, 16), 0.0)
    assert not grad_weight.any()
    assert not grad_bias.any()


def test_a_residual_of_another_dtype(triton_device):
    x, residual = (make("normal", (70, 96), seed=seed, device=triton_device) for seed in (0, 3))
    assert_same_forward(x, residual.bfloat16(), True, 8.0, E4M3.dtype)


def assert_same_backward(shape, dtype, rms, with_residual, device, kind="normal") -> None:
    x, grad_y = make(kind, shape, device=device).to(dtype), make("normal", shape, seed=4, device=device).to(dtype)
    grad_residual = make("normal", shape, seed=5, device=device).to(dtype) if with_residual else None
    weight, bias = parameters(shape[1], rms, device)
    *_, mean, rstd = twin.normalize(x, None, weight, bias, EPS, None, None, torch.float32, rms=rms)
    args = (grad_y, x, mean, rstd, weight, grad_residual)
    got, want = kernel("normalize_backward", *args, rms=rms), twin.normalize_backward(*args, rms=rms)
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape[-1:], g.device) == (w.dtype, w.shape[-1:], w.device)
    # With maxima it is another compilation, which may contract other products to FMA: on the GPU seen to differ in a last bit.
    *again, maxima = kernel("normalize_backward", *args, rms=rms, maxima=True)
    # A neighbouring value of the dtype; in FP32 the sums' order, relative to the largest gradient.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for found in (got, again):
        torch.testing.assert_close(found[0], want[0], rtol=rtol, atol=2e-6 * float(want[0].abs().max()))
        for g, w in zip(found[1:3], want[1:3], strict=True):
            torch.testing.assert_close(g.sum(0), w.sum(0), rtol=1e-4, atol=2e-5 * shape[0] ** 0.5)
    for first, flags in ((got, {}), ((*again, maxima), {"maxima": True})):
        for g, same in zip(first, kernel("normalize_backward", *args, rms=rms, **flags), strict=True):
            assert bits(g).equal(bits(same)), "the same result every time"
    assert got[3].numel() == 0
    assert (maxima.dtype, maxima.shape) == (torch.float32, (got[1].shape[0], 1))
    assert TENSORWISE.amax(maxima).equal(TENSORWISE.amax(again[0]))


@ragged
def test_backward_of_ragged_shapes(shape, rms, triton_device):
    assert_same_backward(shape, torch.bfloat16, rms, True, triton_device)


@each_once(dtype=DTYPES, rms=[False, True])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_backward_of_every_dtype(dtype, rms, with_residual, triton_device):
    assert_same_backward((300, 96), dtype, rms, with_residual, triton_device)


@pytest.mark.parametrize("kind", ["channel-outlier", "log-normal"])
def test_backward_of_other_kinds(kind, triton_device):
    assert_same_backward((70, 96), torch.float32, False, False, triton_device, kind)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_maximum_tells_what_is_not_finite_in_its_part(bad, triton_device):
    x, weight = make("normal", (37, 70), device=triton_device), torch.ones(70, device=triton_device)
    stats, grad_y = torch.ones(37, device=triton_device), make("normal", (37, 70), seed=4, device=triton_device)
    grad_y[36, 69] = bad
    *_, maxima = kernel("normalize_backward", grad_y, x, stats, stats, weight, None, rms=False, maxima=True)
    assert maxima.isinf().sum() == 1
    assert not maxima.isnan().any()


def test_what_lies_beside_the_rows_enters_no_maximum(triton_device):
    x = make("normal", (37, 70), device=triton_device) + 50  # beside a row the deviation from its mean is that of a 0
    grad_y, (weight, _) = make("normal", (37, 70), seed=4, device=triton_device), parameters(70, False, triton_device)
    *_, mean, rstd = twin.normalize(x, None, weight, None, EPS, None, None, torch.float32, rms=False)
    grad_x, *_, maxima = kernel("normalize_backward", grad_y, x, mean, rstd, weight, None, rms=False, maxima=True)
    assert TENSORWISE.amax(maxima).equal(TENSORWISE.amax(grad_x))


SHAPES = [(8192, 64), (4096, 768), (8192, 2048), (2048, 5120), (4096, 8192), (1000, 12288), (1000, 16384), (3001, 4099)]
real_sizes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_pair
@pytest.mark.gpu
@real_sizes
@both_norms
@pytest.mark.parametrize("scale", [None, 8.0], ids=["just-in-time", "delayed"])
def test_real_sizes_on_the_gpu(shape, rms, scale):
    x, residual = (make("normal", shape, seed=seed, device="cuda").bfloat16() for seed in (0, 3))
    assert_same_forward(x, residual, rms, scale, E4M3.dtype, kind_of_weight=torch.bfloat16)
    assert_same_forward(x, None, rms, scale, E5M2.dtype)


@every_pair
@pytest.mark.gpu
@real_sizes
@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_backward_on_the_gpu(shape, rms, dtype):
    assert_same_backward(shape, dtype, rms, True, "cuda")
