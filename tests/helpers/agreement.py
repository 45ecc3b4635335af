"""How a kernel and its twin are compared where exp, rsqrt or a contracted product may differ in the last bit of FP32."""

import torch

from helpers.numerics import Measures, codes, measure
from msamp.numerics.formats import Format
from msamp.numerics.quantize import dequantize


def ordered(payload: torch.Tensor) -> torch.Tensor:
    """FP8 codes as integers in the order of their values: neighbours differ by one, -0 is 0, and NaN has no sign."""
    code = codes(payload)
    magnitude = code & 0x7F
    return torch.where((code < 0x80) | (magnitude == 0x7F), magnitude, -magnitude)


def assert_codes(got: torch.Tensor, want: torch.Tensor, share: float = 0.0) -> None:
    """The same codes, but for neighbours in a `share` of the elements (at least two of them, where it is not 0)."""
    assert (got.dtype, got.shape, got.device, got.is_contiguous()) == (want.dtype, want.shape, want.device, True)
    apart = (ordered(got) - ordered(want)).abs()
    differ, allowed = int((apart > 0).sum()), max(2.0, share * apart.numel()) if share else 0
    assert int(apart.sum()) == differ, "codes differ by more than one"
    assert differ <= allowed, f"{differ} of {apart.numel()} codes differ, {allowed} may"


def assert_plain(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor | None = None) -> None:
    """Wide results: the same to two units of their dtype's last place, and to FP32's of the `terms` that they are a sum of."""
    assert (got.dtype, got.shape, got.device, got.is_contiguous()) == (want.dtype, want.shape, want.device, True)
    step = torch.finfo(want.dtype).eps
    slack = 0.0 if terms is None else 1e-6 * terms.float().abs()
    assert bool(((got.double() - want.double()).abs() <= 2 * max(step, 2e-6) * want.double().abs() + slack + 1e-30).all())


def assert_sums(got: torch.Tensor, want: torch.Tensor, magnitudes: torch.Tensor) -> None:
    """Column sums in FP32, added up in another order, of values with these column sums of `magnitudes`."""
    assert (got.dtype, got.shape, got.device) == (torch.float32, want.shape, want.device)
    assert bool(((got.double() - want.double()).abs() <= 1e-5 * magnitudes.double()).all())


def assert_no_worse(exact: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, ideal: torch.Tensor) -> None:
    """By SQNR, underflow and saturation, `payload` stands for `exact` as `ideal` does, the exact values rounded once by the same scale."""
    got: Measures = measure(exact, dequantize(payload, scale_inv), payload, fmt)
    want: Measures = measure(exact, dequantize(ideal, scale_inv), ideal, fmt)
    assert got.sqnr_db >= want.sqnr_db - 0.05, (got, want)
    assert got.underflow <= want.underflow + 1e-3, (got, want)
    assert got.saturation <= want.saturation + 1e-3, (got, want)
