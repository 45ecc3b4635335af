"""How Hopper's tensor cores sum FP8 products, to the bit.

FP8 products are exact in FP32, but the tensor cores do not sum them in FP32. They take 32 products at a time together with the sum so far,
align all of them to the largest exponent among them, cut each 13 bits below it (toward zero, not to nearest), and cut the new sum again to
13 bits below its own exponent:

    E    = max(exponent of the sum, exponent(a_k) + exponent(b_k) for the products of the block that are not zero)
    sum  = cut(cut(sum, 2^(E - 13)) + sum_k cut(a_k b_k, 2^(E - 13)), 13 bits)        a sum of zero is +0

The exponent of a subnormal number is its format's smallest one: -6 in E4M3, -14 in E5M2. A product below 2^-13 of the sum vanishes, and
because cutting goes toward zero, sums of one sign shrink with their length. There are two ways to use this accumulator:

    fast    it holds the whole sum over K
    full    after every 128 products it is added to an FP32 total, rounded to nearest, and starts from zero

Measured on an H200 with torch 2.11 and cuBLAS 13, relative errors by K (random signs: of the norm; equal signs: the mean):

    K          fast, random signs    full, random signs    fast, equal signs    full, equal signs
    512        3.4e-4                1.26e-4               -0.6 %               -0.06 %
    4,096      1.3e-3                1.26e-4               -7.0 %               -0.06 %
    32,768     4.7e-3                1.26e-4               -36.7 %              -0.06 %

Sources. F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv:2512.07004), found the alignment by experiment; the
package mmaemu 0.1.0 is another implementation of it, for cuBLAS on an H100, and has the bits of an H200 too. DeepSeek-V3 (arXiv:2412.19437,
section 3.3.2) promotes partial sums after 128 products because of it. `tests/golden/accumulation.json` contains outputs of an H200.

`torch._scaled_mm` with cuBLAS 13.1, our grouped GEMMs and Triton's `tl.dot` have these bits on an H200. `tl.dot` is fast by default, and
promotes after n products with `max_num_imprecise_acc=n`; our grouped GEMMs do not set it: fast ones keep the sum in one `tl.dot`, full ones
add a `tl.dot` of 128 products to their total. cuBLAS may divide K among thread blocks (split-K, if there are few rows and columns): then
each piece is summed like this, and the pieces are added in FP32. A bias is added in FP32 too. The bits of a NaN are not defined here.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar

import torch

BLOCK = 32  # products that are aligned together
BITS = 13  # below the largest exponent
PROMOTED = 128  # products after which full accumulation adds to the FP32 total

_NOTHING = -64  # the exponent of zero: with any other exponent it is below that of every product
_TILE = 1 << 22  # products computed at once
_MANTISSA = (1 << 23 - BITS) - 1  # the bits of FP32 that a cut to 13 bits clears
_EXPONENT = 0xFF << 23

_TWINS: ContextVar[str] = ContextVar("accumulation of reference twins", default="fp32")


@contextlib.contextmanager
def accumulating(accumulation: str) -> Iterator[None]:
    """Let the reference twins of FP8 products on a CPU sum as this says, in this thread.

    Args:
        accumulation: "hopper", to the bit and some twenty times slower than FP32; "fp32" is the default.
    """
    token = _TWINS.set(accumulation)
    try:
        yield
    finally:
        _TWINS.reset(token)


def like_hopper() -> bool:
    """Whether reference twins sum as Hopper does (`accumulating`)."""
    return _TWINS.get() == "hopper"


SUMS = ("want^2", "(got - want)^2", "got want")  # what `judge_sums` takes
SAMPLE = 16, 256  # rows and columns of a product


def compared(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return `SUMS` of FP64 tensors of one shape, FP64 [3]."""
    return torch.stack([want.square().sum(), (got - want).square().sum(), (got * want).sum()])


@torch.no_grad()
def tally_product_(
    tallies: Iterable[torch.Tensor], got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale_inv: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Compare some rows and columns of an FP8 product with their sums in FP64. There is no host sync (for CUDA graphs).

    Args:
        tallies: FP64 [3], `SUMS`, to each of which the sums over the sample are added.
        got: [M, N], the product with its scales and bias, in any float dtype.
        a, b: [M, K] and [N, K] FP8.
        scale_inv: 0-dim, the factor of the product.
        bias: [N] or None.
    """
    m, n = (slice(None, None, max(1, math.ceil(size / most))) for size, most in zip(got.shape, SAMPLE, strict=True))
    want = (a[m].double() @ b[n].double().t()) * scale_inv.double()
    summed = got[m, n].double() if bias is None else got[m, n].double() - bias[n].double()
    _add(tallies, compared(summed, want))


@torch.no_grad()
def tally_grouped_(
    tallies: Iterable[torch.Tensor], got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, scale_inv: torch.Tensor
) -> None:
    """As `tally_product_`, of `ops.grouped_mm` or `ops.grouped_mm_grad_weight`; of weight gradients for the expert with most rows.

    Args:
        tallies: as there.
        got: [R, N] the outputs or input gradients; [E, N, K] the gradients of weights.
        a, b: FP8 [R, K] and [E, N, K]; for gradients of weights [N, R] and [K, R].
        offsets: int32 [E], the ends of the experts' rows.
        scale_inv: the factor of the product, FP32 [E]; for gradients of weights 0-dim.
    """
    counts, device = offsets.diff(prepend=offsets.new_zeros(1)), got.device
    step = max(1, math.ceil(got.shape[-1] / SAMPLE[1]))
    if got.ndim == 2:
        rows = (torch.arange(SAMPLE[0], device=device) * offsets[-1]).div(SAMPLE[0], rounding_mode="floor")
        expert = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
        right = b[:, ::step].view(torch.uint8)[expert].view(b.dtype).double()
        want = (right @ a.view(torch.uint8)[rows].view(a.dtype).double()[..., None])[..., 0] * scale_inv[expert].double()[:, None]
        got = got[rows, ::step]
    else:
        e = counts.argmax()
        row = torch.arange(a.shape[1], device=device)
        inside = (row < offsets[e]) & (row >= offsets[e] - counts[e])
        n = slice(None, None, max(1, math.ceil(got.shape[1] / SAMPLE[0])))
        left, right = (torch.where(inside, x.float(), 0.0).double() for x in (a[n], b[::step]))
        want, got = left @ right.t() * scale_inv.double(), got[:, n, ::step].index_select(0, e[None])[0]
    _add(tallies, torch.where(counts.sum() > 0, compared(got.double(), want), 0.0))  # without rows nothing was computed


def _add(tallies: Iterable[torch.Tensor], row: torch.Tensor) -> None:
    for tally in tallies:
        tally += row


def judge_sums(tally: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the computed sums over the exact ones, below 1 where they shrink, and their SQNR in dB; NaN and inf as in
    `msamp.numerics.metrics`. A BF16 product has about 55 dB for its own rounding, which does not change the slope."""
    want, noise, along = tally
    ratio = want / noise if noise else math.inf
    return (along / want if want else math.nan), (10 * math.log10(ratio) if ratio > 0 else math.nan)


def product(a: torch.Tensor, b: torch.Tensor, accumulation: str) -> torch.Tensor:
    """Compute `a @ b.mT` of FP8 codes, without scales.

    Args:
        a: [..., M, K] FP8.
        b: [..., N, K] FP8; leading dimensions broadcast against those of `a`.
        accumulation: "fast" or "full" of Hopper's tensor cores, to the bit, or "exact", the sum in FP64.

    Returns:
        [..., M, N] FP32. Products with NaN or Inf, and their sums, are those of IEEE arithmetic.
    """
    left, right = a.float(), b.float()
    if accumulation == "exact":
        return (left.double() @ right.double().mT).float()
    columns = max(a.shape[:-2].numel(), b.shape[:-2].numel()) * b.shape[-2]
    pieces = left.split(max(1, _TILE // (BLOCK * max(1, columns))), -2)
    factors = right.nan_to_num(0, 0, 0), _exponents(right, b.dtype)
    span = PROMOTED if accumulation == "full" else max(1, a.shape[-1])
    out = torch.cat([_sum(piece.nan_to_num(0, 0, 0), _exponents(piece, a.dtype), *factors, span) for piece in pieces], -2)
    if not (left.isfinite().all() and right.isfinite().all()):
        ieee = left @ right.mT
        out = torch.where(ieee.isfinite(), out, ieee)
    return out


def _exponents(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the exponents of FP8 values, int8: of subnormals the smallest of the format, of zeros and non-finite values `_NOTHING`."""
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponents = torch.frexp(values).exponent.clamp(min=smallest) - 1
    return exponents.masked_fill((values == 0) | ~values.isfinite(), _NOTHING).to(torch.int8)


def _sum(left: torch.Tensor, left_exponents: torch.Tensor, right: torch.Tensor, right_exponents: torch.Tensor, span: int) -> torch.Tensor:
    """Sum the products of FP32 [..., M, K] and [..., N, K], promoted after every `span`. The summed dimension is moved to the front, where
    sums and maxima over it are vectorized."""
    rows, row_exponents = (x.movedim(-1, 0).unsqueeze(-1).contiguous() for x in (left, left_exponents))
    columns, column_exponents = (x.movedim(-1, 0).unsqueeze(-2).contiguous() for x in (right, right_exponents))
    total = partial = torch.zeros_like((rows[:1] * columns[:1]).sum(0))
    for at in range(0, len(rows), BLOCK):
        if at and not at % span:
            total, partial = total + partial, torch.zeros_like(total)
        block = slice(at, at + BLOCK)
        top = (row_exponents[block] + column_exponents[block]).amax(0).int().add_(127).bitwise_left_shift_(23)
        top = torch.maximum(top.clamp_(min=1 << 29), partial.view(torch.int32) & _EXPONENT)  # FP32 bits of 2^E
        unit = top.view(torch.float32) * 2.0**-BITS
        units = (rows[block] * columns[block]).mul_(1 / unit).trunc_().sum(0) + (partial / unit).trunc()
        partial = ((units * unit).view(torch.int32) & ~_MANTISSA).view(torch.float32) + 0.0  # -0 becomes +0
    return total + partial
