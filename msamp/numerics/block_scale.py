"""Block scaling: four rules that turn the amax of each block into its scale, and the cast that follows.

A block-scaled operand is an FP8 payload and a table of scale_inv, one per block (`msamp.numerics.granularity.Block`). Scaling is just in
time: a block's scale follows from its own amax, so there are no histories. `fp_max` is the largest value of the format (448 for E4M3, 57344
for E5M2) and `amax` the largest magnitude in a block. All operations are in FP32, rounded to nearest even:

| rule | stored scale_inv | scale, multiplies into FP8 | blocks in the papers |
| --- | --- | --- | --- |
| `fp32` [DeepSeek-V3, section 3.3.2] | max(amax, fp_max * 2^-126) / fp_max, FP32 | 1 / scale_inv | 1 x 128; weights 128 x 128 |
| `power-of-two` [Transformer Engine's default for blockwise] | 1 / scale (exact), FP32 | `scale_from_amax` | the same |
| `e8m0` [OCP Microscaling Formats v1.0, section 6.3] | 2^(floor(log2(amax)) - emax), E8M0 | 1 / scale_inv (exact) | 1 x 32 |
| `e8m0-up` [Transformer Engine's MXFP8BlockScaling] | 2^ceil(log2(amax / fp_max)), E8M0 | 1 / scale_inv (exact) | 1 x 32 |

The cast is q = cast(x * scale), which rounds to nearest even and saturates at +-fp_max; the dequantized value is q * scale_inv.

- `fp32` uses the whole format. The division and the reciprocal round, so amax * scale may differ from fp_max by one unit in the last place
  of FP32, but the largest element of a block is cast to exactly fp_max: it rounds up or saturates. Below amax = fp_max * 2^-126, scale_inv
  is clamped to 2^-126, so that it and its reciprocal stay in FP32's normal range. The scale is the reciprocal of the stored scale_inv, so
  the codes follow from x and scale_inv alone.
- `power-of-two` is the tensorwise rule applied to each block: the largest power of two with amax * scale <= fp_max, exponent clamped to
  +-126. Nothing saturates, up to one binade of the format stays unused, and multiplying by the scale is exact.
- `e8m0` is another power of two: emax is the exponent of fp_max (8 for E4M3, 15 for E5M2), so the largest element lies in the format's last
  binade, [2^emax, 2^(emax + 1)). E4M3 ends at 1.75 * 2^8: elements above 448 * scale_inv, up to 512 * scale_inv, saturate, as the
  specification prescribes. E5M2 likewise saturates above 1.75 * 2^15. scale_inv is one byte, the exponent with bias 127, clamped to 0 at
  the lower end (2^-127); 254 is never needed, because amax is below 2^128. `values` returns it in FP32.

- `e8m0-up` stores the scale_inv of `power-of-two` in E8M0, so nothing saturates. It differs from `e8m0` where amax is above 448 (E4M3) or
  57344 (E5M2) times a power of two: in about one block of six of random data, whose scale_inv is twice as large.

A block of zeros has scale_inv 1 under the first two rules, and 2^-127 under E8M0's, as their clamp gives. A block that contains
NaN or infinity has scale_inv NaN (code 255 in E8M0), so all of its values read back as NaN, and every product with it is NaN. Its elements
are cast with scale 1.

Blocks run along the dimension that a GEMM sums over, because the scales of two blocks factor out of their partial sum only then. That
dimension is the last one of both operands (K-major):

| GEMM | left, 1 x 128 | right | sum over |
| --- | --- | --- | --- |
| output = input @ weight.T | input along in_features | weight, 128 x 128 | in_features |
| grad_input = grad_output @ weight | grad_output along out_features | weight.T, 128 x 128: the same codes, transposed | out_features |
| grad_weight = grad_output.T @ input | grad_output.T along tokens | input.T along tokens, 1 x 128 | tokens |

Each of these operands is cast once, from the high-precision tensor. Input and grad_output are therefore cast twice, along their rows and
along their columns, in one read (`msamp.kernels.ops.block_cast`). Forward also casts the input's transpose for grad_weight and saves it
instead of the other layout, at the same size: 1 byte per element and one scale per block. Requantizing the saved payload along the other
dimension, as DeepSeek-V3 does, would round twice, and `fp32` scales would then give values that neither cast gives. `e8m0` has no square
blocks: every operand, weights too, is cast in 1 x 32 along the dimension that its GEMM sums over, so weights are cast twice as well.
"""

import torch

from msamp.numerics.formats import Format
from msamp.numerics.granularity import Granularity
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import NOT_FINITE, Current, Exact, Scaling, SharedExponent

RULES: dict[str, Scaling] = {"fp32": Exact(), "power-of-two": Current(), "e8m0": SharedExponent(), "e8m0-up": SharedExponent(round_up=True)}


def by_name(rule: str) -> Scaling:
    """Return the scale rule of that name; raise a ValueError if it is unknown."""
    if rule not in RULES:
        raise ValueError(f"scale rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    return RULES[rule]


def name_of(scaling: Scaling) -> str | None:
    """Return the name of a scaling rule in `RULES`; None for any other rule."""
    return next((name for name, rule in RULES.items() if rule == scaling), None)


def values(scale_inv: torch.Tensor) -> torch.Tensor:
    """Return a stored scale_inv as FP32. FP32 is returned as it is; E8M0 (uint8) becomes 2^(code - 127), and NaN for code 255."""
    if scale_inv.dtype != torch.uint8:
        return scale_inv
    code = scale_inv.int()
    bits = torch.where(code == 0, 1 << 22, code << 23)  # 2^-127 is a subnormal number of FP32
    return bits.view(torch.float32).masked_fill(code == NOT_FINITE, float("nan"))


def block_scale(scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the FP32 scale that multiplies into FP8, given a stored scale_inv; 1 where a block is not finite."""
    inverted = values(scale_inv).reciprocal()
    return inverted.masked_fill(inverted.isnan(), 1.0)


def quantize_blocks(x: torch.Tensor, granularity: Granularity, fmt: Format, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast `x` with one just-in-time scale per block.

    Args:
        x: FP32, BF16 or FP16, any shape that `granularity` can divide into blocks.
        granularity: which elements share a scale.
        fmt: E4M3 or E5M2.
        rule: one of `RULES`.

    Returns:
        The payload, of `fmt.dtype`, and the stored scale_inv of shape `granularity.scales_shape(x.shape)`.
    """
    scale_inv = by_name(rule).scale_inv(granularity.maxima(x), fmt.max)
    return quantize(x.detach(), granularity.spread(block_scale(scale_inv), x.shape), fmt), scale_inv
