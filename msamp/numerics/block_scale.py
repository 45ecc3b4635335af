"""Blockwise scaling: from the amax of each block to its scale, in three rules, and the cast that follows.

An operand in blocks is a payload (FP8, one code an element) and a table of scale_inv, one a block (`msamp.numerics.granularity.Block`).
All of it is just in time: a block's scale comes from the block's own amax, so nothing has a history. With `fp_max` the largest value of
the format (448 of E4M3, 57344 of E5M2), `amax` the largest magnitude of a block in FP32, every operation in FP32 and rounded to nearest
even:

| rule | scale_inv, kept | scale, multiplies into FP8 | blocks in the papers |
| --- | --- | --- | --- |
| `fp32` [DeepSeek-V3, section 3.3.2] | max(amax, fp_max * 2^-126) / fp_max, FP32 | 1 / scale_inv | 1 x 128; weights 128 x 128 |
| `power-of-two` [Transformer Engine's default for blockwise] | 1 / scale (exact), FP32 | `scale_from_amax` | the same |
| `e8m0` [OCP Microscaling Formats v1.0, section 6.3] | 2^(floor(log2(amax)) - emax), E8M0 | 1 / scale_inv (exact) | 1 x 32 |

and then q = cast(x * scale), which rounds to nearest even and saturates at +-fp_max, and the value that q stands for is q * scale_inv.

- `fp32` uses the whole format. The division and the reciprocal round, so amax * scale may be a unit of FP32 off fp_max: the largest
  element of a block is cast to fp_max exactly, rounded to it from below or saturated to it from above. Below amax = fp_max * 2^-126,
  scale_inv stays 2^-126, so that neither it nor its reciprocal leaves FP32's normal range. The codes follow from x and the kept
  scale_inv alone: the reciprocal is taken of what is kept.
- `power-of-two` is our own tensorwise rule, block by block: the largest power of two with amax * scale <= fp_max, exponent clamped to
  +-126. Nothing saturates, up to one binade of the format stays unused, and the product with a scale rounds nothing.
- `e8m0` is a power of two by another rule: emax is the exponent of fp_max (8 of E4M3, 15 of E5M2), so the largest element lands in the
  format's last binade, [2^emax, 2^(emax + 1)). E4M3 ends at 1.75 * 2^8: elements above 448 * scale_inv, up to 512 * scale_inv, saturate,
  as the specification has it. Those of E5M2 saturate likewise above 1.75 * 2^15. scale_inv is one byte, the exponent with bias 127, clamped
  to 0 at the lower end (2^-127); 254 is never needed, because amax is below 2^128. `values` gives it in FP32.

A block of zeros has scale_inv 1 by the first two rules, and 2^-127 by `e8m0`, which is what its formula and clamp give. A block that holds
a NaN or an infinity has scale_inv NaN, code 255 of E8M0: all of its values read back as NaN, and so does every product that it enters.
Its elements are cast by scale 1.

The blocks of each GEMM of a linear layer: blocks of one row run along the dimension that is summed over, because the product of two
blocks can be scaled only where both scales leave the sum; the summed dimension is the last one of both operands (K-major):

| GEMM | left, 1 x 128 | right | sum over |
| --- | --- | --- | --- |
| output = input @ weight.T | input along in_features | weight, 128 x 128 | in_features |
| grad_input = grad_output @ weight | grad_output along out_features | weight.T, 128 x 128: the same codes, transposed | out_features |
| grad_weight = grad_output.T @ input | grad_output.T along tokens | input.T along tokens, 1 x 128 | tokens |

Every one of these is cast once, from the high-precision tensor. So input and grad_output are cast twice, along their rows and along their
columns, in one read (`msamp.kernels.ops.block_cast`). The input's transpose for grad_weight is cast in forward and kept for backward in
place of the other, at the same size: one byte an element and one scale a block. Requantising the kept payload along the other dimension, as
DeepSeek-V3 does, would round twice, and with `fp32` scales to values that neither cast would give. In `e8m0` there are no square blocks:
every operand, weights too, is cast in 1 x 32 along the dimension that its GEMM sums over, so a weight is cast twice as well.
"""

import torch

from msamp.numerics.formats import Format
from msamp.numerics.granularity import Granularity
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import NOT_FINITE, Current, Exact, Scaling, SharedExponent

RULES: dict[str, Scaling] = {"fp32": Exact(), "power-of-two": Current(), "e8m0": SharedExponent()}


def by_name(rule: str) -> Scaling:
    """The scale rule of that name; ValueError for one that does not exist."""
    if rule not in RULES:
        raise ValueError(f"scale rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    return RULES[rule]


def name_of(scaling: Scaling) -> str | None:
    """The name in `RULES` of a scaling rule; None for any other."""
    return next((name for name, rule in RULES.items() if rule == scaling), None)


def block_scale_inv(amax: torch.Tensor, fmt: Format, rule: str) -> torch.Tensor:
    """The scale_inv of blocks with these maxima, as it is kept: `Scaling.scale_inv` of the rule of that name, into `fmt`.

    Raises:
        ValueError: for an unknown rule.
    """
    return by_name(rule).scale_inv(amax, fmt.max)


def values(scale_inv: torch.Tensor) -> torch.Tensor:
    """FP32: what a kept scale_inv stands for. FP32 stays as it is; E8M0 (uint8) is 2^(code - 127), and NaN of 255."""
    if scale_inv.dtype != torch.uint8:
        return scale_inv
    code = scale_inv.int()
    bits = torch.where(code == 0, 1 << 22, code << 23)  # 2^-127 is a subnormal number of FP32
    return bits.view(torch.float32).masked_fill(code == NOT_FINITE, float("nan"))


def block_scale(scale_inv: torch.Tensor) -> torch.Tensor:
    """FP32: the scale that multiplies into FP8, of a kept scale_inv; 1 where a block is not finite."""
    inverted = values(scale_inv).reciprocal()
    return inverted.masked_fill(inverted.isnan(), 1.0)


def quantize_blocks(x: torch.Tensor, granularity: Granularity, fmt: Format, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast `x` with a just-in-time scale for every block.

    Args:
        x: FP32, BF16 or FP16, any shape of which `granularity` has blocks.
        granularity: which elements share a scale.
        fmt: E4M3 or E5M2.
        rule: one of `RULES`.

    Returns:
        The payload, of `fmt.dtype`, and the kept scale_inv of shape `granularity.scales_shape(x.shape)`.
    """
    scale_inv = block_scale_inv(granularity.maxima(x), fmt, rule)
    return quantize(x.detach(), granularity.spread(block_scale(scale_inv), x.shape), fmt), scale_inv
