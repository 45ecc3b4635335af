"""The norms against torch's own in FP64, and what they leave behind for FP8."""

import pytest
import torch
import torch.nn.functional as F

from helpers.choices import every_pair
from helpers.numerics import KINDS, codes, make, measure
from msamp.kernels import ops
from msamp.kernels.reference.normalize import normalize, normalize_backward, normalize_transposed
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import scale_from_amax

M, N, EPS = 48, 96, 1e-5
both_norms = pytest.mark.parametrize("rms", [False, True], ids=["layer-norm", "rms-norm"])
every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)

# Least SQNR in dB of the quantised y, one scale a tensor, for normal, channel-outlier and log-normal input; nothing may saturate but
# the amax itself.
SQNR = {E4M3: (31.0, 31.0, 30.5), E5M2: (24.8, 24.8, 24.5)}
UNDERFLOW = {E4M3: (1e-3, 0.02, 0.06), E5M2: (1e-3, 1e-3, 1e-3)}


def parameters(rms: bool, n: int = N) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = 1.0 + 0.2 * make("normal", (n,), seed=1)
    return weight, None if rms else 0.1 * make("normal", (n,), seed=2)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rms: bool) -> torch.Tensor:
    """y in FP64 by torch's own norm."""
    shape = (x.shape[1],)
    if rms:
        return F.rms_norm(x.double(), shape, weight.double(), EPS)
    return F.layer_norm(x.double(), shape, weight.double(), None if bias is None else bias.double(), EPS)


@every_pair
@both_norms
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_y_is_that_of_torch(kind, dtype, rms):
    x, (weight, bias) = make(kind, (M, N)).to(dtype), parameters(rms)
    total, y, scale_inv, mean, rstd = normalize(x, None, weight, bias, EPS, None, None, torch.float32, rms=rms)
    torch.testing.assert_close(y.double(), exact(x, weight, bias, rms), rtol=1e-5, atol=1e-5)
    assert (total.numel(), scale_inv.numel(), mean.shape, rstd.shape) == (0, 0, (0,) if rms else (M,), (M,))
    assert total.dtype == dtype
    y16 = normalize(x, None, weight, bias, EPS, None, None, torch.bfloat16, rms=rms)[1]
    assert y16.equal(y.bfloat16()), "one rounding"


@both_norms
def test_the_sum_is_rounded_before_it_is_normalised(rms):
    x, residual, (weight, bias) = make("normal", (M, N)).bfloat16(), make("normal", (M, N), seed=3).bfloat16(), parameters(rms)
    total, y, *_ = normalize(x, residual, weight, bias, EPS, None, None, torch.float32, rms=rms)
    assert total.equal(x + residual)
    assert y.equal(normalize(total, None, weight, bias, EPS, None, None, torch.float32, rms=rms)[1])


@every_pair
@both_norms
@every_fp8
@pytest.mark.parametrize("given", [True, False], ids=["delayed", "just-in-time"])
def test_scale_amax_and_scale_inv(fmt, rms, given):
    x, (weight, bias) = make("normal", (M, N)), parameters(rms)
    wide = normalize(x, None, weight, bias, EPS, None, None, torch.float32, rms=rms)[1]
    largest = wide.abs().amax()
    scale = torch.tensor(2.0**-3) if given else scale_from_amax(largest, fmt.max)
    slot = torch.tensor(0.5)
    _, y, scale_inv, mean, rstd = normalize(x, None, weight, bias, EPS, scale if given else None, slot, fmt.dtype, rms=rms)
    assert slot == largest
    assert scale_inv == 1 / scale
    assert scale_inv.ndim == 0
    told = torch.zeros(())
    assert normalize(x, None, weight, bias, EPS, scale if given else None, None, fmt.dtype, rms=rms, scale_inv_slot=told)[2].numel() == 0
    assert told == scale_inv
    assert codes(y).equal(codes(quantize(wide, scale, fmt)))
    y_t = normalize_transposed(x, mean, rstd, weight, bias, scale_inv, fmt.dtype, rms=rms)
    assert y_t.is_contiguous()
    assert codes(y_t).equal(codes(y).t())


@every_pair
@both_norms
@every_fp8
@pytest.mark.parametrize("kind", KINDS)
def test_loss_three_ways(kind, fmt, rms):
    x, (weight, bias) = make(kind, (256, 128)), parameters(rms, 128)
    _, y, scale_inv, *_ = normalize(x, None, weight, bias, EPS, None, None, fmt.dtype, rms=rms)
    got = measure(exact(x, weight, bias, rms).float(), dequantize(y, scale_inv), y, fmt)
    at = KINDS.index(kind)
    assert got.sqnr_db >= SQNR[fmt][at], got
    assert got.underflow <= UNDERFLOW[fmt][at], got
    assert got.saturation <= 2 / y.numel(), got


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    x, (weight, bias), slot = make("normal", (M, N)), parameters(False), torch.tensor(0.0)
    x[3, 5] = bad
    _, y, scale_inv, *_ = normalize(x, None, weight, bias, EPS, torch.tensor(2.0), slot, E4M3.dtype, rms=False)
    assert scale_inv.isnan()
    assert slot.isinf()
    assert y.float()[3].isnan().all()
    assert y.float()[4].isfinite().all()


@every_pair
@both_norms
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_gradients_are_those_of_autograd(kind, dtype, rms, with_residual):
    x, grad_y = make(kind, (M, N)).to(dtype), make("normal", (M, N), seed=4).to(dtype)
    grad_residual = make("normal", (M, N), seed=5).to(dtype) if with_residual else None
    leaves = [None if p is None else p.double().requires_grad_() for p in (x, *parameters(rms))]
    exact(*leaves, rms).backward(grad_y.double())
    want = leaves[0].grad if grad_residual is None else leaves[0].grad + grad_residual.double()

    weight, bias = parameters(rms)
    *_, mean, rstd = normalize(x, None, weight, bias, EPS, None, None, torch.float32, rms=rms)
    grad_x, grad_weight, grad_bias, _ = normalize_backward(grad_y, x, mean, rstd, weight, grad_residual, rms=rms)
    assert (grad_x.dtype, grad_weight.dtype, grad_bias.dtype) == (dtype, torch.float32, torch.float32)
    # One rounding to the dtype of x; in FP32 the cancellation in the projection, relative to the largest gradient.
    scale = want.abs().amax().item()
    torch.testing.assert_close(grad_x.double(), want, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=2e-6 * scale)
    torch.testing.assert_close(grad_weight.double().sum(0), leaves[1].grad, rtol=1e-5, atol=1e-4)
    if rms:
        assert grad_bias.numel() == 0
    else:
        torch.testing.assert_close(grad_bias.double().sum(0), leaves[2].grad, rtol=1e-5, atol=1e-4)


def test_no_rows():
    x, (weight, bias) = torch.empty(0, N), parameters(False)
    _, y, scale_inv, mean, rstd = normalize(x, None, weight, bias, EPS, torch.tensor(2.0), None, E4M3.dtype, rms=False)
    assert (y.shape, scale_inv, mean.shape) == ((0, N), 0.5, (0,))
    assert normalize_transposed(x, mean, rstd, weight, bias, scale_inv, E4M3.dtype, rms=False).shape == (N, 0)
    grad_x, grad_weight, grad_bias, maxima = normalize_backward(x, x, mean, rstd, weight, None, rms=False, maxima=True)
    assert (grad_x.shape, maxima.shape) == ((0, N), (0, 1))
    assert not grad_weight.any()
    assert not grad_bias.any()


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_maxima_are_those_of_the_gradient_as_it_is_stored(rms, dtype):
    x, grad_y, residual = (make("log-normal", (24, N), seed=seed).to(dtype) for seed in (0, 4, 5))
    weight, bias = parameters(rms)
    *_, mean, rstd = normalize(x, None, weight, bias, EPS, None, None, torch.float32, rms=rms)
    plain = normalize_backward(grad_y, x, mean, rstd, weight, residual, rms=rms)
    *same, maxima = normalize_backward(grad_y, x, mean, rstd, weight, residual, rms=rms, maxima=True)
    assert all(a.equal(b) for a, b in zip(same, plain[:3], strict=True))
    assert plain[3].numel() == 0
    assert maxima.equal(same[0].float().abs().amax(1, keepdim=True))
    assert TENSORWISE.amax(maxima).equal(TENSORWISE.amax(same[0]))
    grad_y[3, 5] = float("nan")
    assert normalize_backward(grad_y, x, mean, rstd, weight, None, rms=rms, maxima=True)[3].isinf().flatten().nonzero().tolist() == [[3]]


X, ROW = torch.zeros(4, 8), torch.ones(8)
STATS = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalize(X[0], None, ROW, None, EPS, None, None, E4M3.dtype, rms=True), r"\(8,\).*requires \[M, N\].*flatten"),
        (lambda: normalize(X.double(), None, ROW, None, EPS, None, None, E4M3.dtype, rms=True), "float64.*BF16, FP16 or FP32"),
        (lambda: normalize(X, X.double(), ROW, None, EPS, None, None, E4M3.dtype, rms=True), "residual is torch.float64"),
        (lambda: normalize(X, X[:2], ROW, None, EPS, None, None, E4M3.dtype, rms=True), r"residual is .*\(2, 8\)"),
        (lambda: normalize(X, None, ROW[:4], None, EPS, None, None, E4M3.dtype, rms=True), r"weight is \(4,\).*\[N\], \(8,\).*pass this"),
        (lambda: normalize(X, None, ROW, ROW, EPS, None, None, E4M3.dtype, rms=True), "RMSNorm does not support a bias; pass None"),
        (lambda: normalize(X, None, ROW, None, EPS, None, None, torch.float64, rms=True), "dtype is torch.float64; choose an FP8 dtype"),
        (lambda: normalize_transposed(X, STATS, STATS, ROW[:4], None, ROW[0], E4M3.dtype, rms=False), r"weight is \(4,\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@both_norms
@pytest.mark.parametrize("given", [True, False], ids=["everything", "the-least"])
def test_schema_fake_and_dispatch(rms, given, device):
    x = make("normal", (24, 40), device=device).bfloat16()
    weight, bias = (None if p is None else p.to(device) for p in parameters(rms, 40))
    slot, scale = torch.zeros((), device=device), torch.tensor(4.0, device=device)
    forward = (x, x, weight, bias, EPS, scale, slot, E4M3.dtype) if given else (x, None, weight, None, EPS, None, None, x.dtype)
    *_, mean, rstd = ops.normalize(*forward, rms=rms)
    backward = (x, x, mean, rstd, weight, x if given else None)
    for name, args, more in (
        ("normalize", forward, {}),
        ("normalize_transposed", (x, mean, rstd, weight, bias, scale, E4M3.dtype), {}),
        ("normalize_backward", backward, {"maxima": given}),
    ):
        flags = {"rms": rms, **more}
        torch.library.opcheck(getattr(torch.ops.msamp, name).default, args, flags, test_utils="test_schema")
        op = getattr(ops, name)
        real = op(*args, **flags)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args), **flags)
        for r, f in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (real, fake)), strict=True):
            assert (r.shape, r.dtype, r.stride(), r.device.type) == (f.shape, f.dtype, f.stride(), f.device.type)
