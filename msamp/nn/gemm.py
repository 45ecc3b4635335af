"""The FP8 GEMMs: how a linear layer's tensors become FP8 operands, and the three products that read them.

A linear layer y = x W^T has three GEMMs (FP8-LM section 2), for x [tokens, inputs], W [outputs, inputs] and g [tokens, outputs]:

    output       x  W^T    sums over the input features
    grad_input   g  W      sums over the output features
    grad_weight  g^T x     sums over the tokens

Hopper's FP8 GEMM requires both operands K-major: the dimension that is summed over comes last. So input, weight and grad_output each enter
one GEMM as they are and another one transposed. An `Operand` holds one or both layouts, each with its scales, and `cast_operand` writes
both from one read of the tensor.

With one scale per tensor both layouts contain the same codes and share the scale, and one factor turns the product back into values:

    y = (q_x q_w^T) scale_inv_x scale_inv_w

With block scales each layout is cast separately, because a block runs along the dimension that is summed over: only then do the block's two
scales factor out of its partial sum.

Every FP8 product goes through `LayerGemm`: the linear function, the fused blocks (whose kernels write operands themselves), and the
tensor-parallel layers (which gather payloads between cast and GEMM). What depends on the granularity is in a `GranularityKernels`. There
are three: kernels for one scale per tensor, for blocks, and plain torch for any other granularity.

Next: `linear_fn` and the fused blocks call this file. `msamp.kernels.ops` contains the kernels, `msamp.numerics.block_scale` the rules for
block scales, and `scaling_state` the scales that a layer keeps from step to step.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from msamp.kernels import ops, scalar_pool
from msamp.kernels.reference.block_cast import has_kernel
from msamp.kernels.scaled_mm import bf16_linear, have_product
from msamp.nn.cast_scales import CastScales, just_in_time_scale, own_rule
from msamp.nn.channel_scales import ChannelSlots
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.accumulation import tally_product_
from msamp.numerics.block_scale import name_of, values
from msamp.numerics.formats import BF16
from msamp.numerics.granularity import TENSORWISE, Block, Granularity
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.recipe import Cast, Gemms, Product
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor

Combine = Callable[[torch.Tensor], torch.Tensor]  # this rank's amax, FP32 0-dim -> that of all ranks
Scales = tuple[torch.Tensor, torch.Tensor]  # of a stored weight, as `LinearScaling.weight_scales` returns them


class Operand(NamedTuple):
    """A tensor of a linear layer in FP8.

    Attributes:
        payload: [M, K], row-major; None if only the transpose was requested.
        payload_t: [K, M], row-major; None if it was not requested.
        scale_inv: FP32, of `payload`, in its granularity's `scales_shape`: 0-dim with one scale per tensor.
        scale_inv_t: of `payload_t`; the same tensor with one scale per tensor.
        granularity: which elements share a scale.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    scale_inv: torch.Tensor
    scale_inv_t: torch.Tensor
    granularity: Granularity = TENSORWISE

    @classmethod
    def tensorwise(
        cls, payload: torch.Tensor | None = None, *, scale_inv: torch.Tensor, payload_t: torch.Tensor | None = None
    ) -> "Operand":
        """An operand with one scale, FP32 0-dim, as a fused kernel writes it."""
        return cls(payload, payload_t, scale_inv, scale_inv, TENSORWISE)  # explicit: torch 2.11 cannot trace the default's source

    @classmethod
    def kept(cls, payload_t: torch.Tensor, scale_inv_t: torch.Tensor, cast: Cast) -> "Operand":
        """An operand that has only its transpose, which was saved for backward."""
        return cls(None, payload_t, scale_inv_t, scale_inv_t, cast.granularity)

    @property
    def codes(self) -> torch.Tensor:
        """`payload`, for a caller that requested it."""
        assert self.payload is not None
        return self.payload

    @property
    def element_scale_inv(self) -> torch.Tensor:
        """FP32 scale_inv per element of `payload`: 0-dim, or a shape that broadcasts against it."""
        return self.granularity.spread(values(self.scale_inv), self.codes.shape)

    def transposed(self) -> "Operand":
        """The transposed operand, as grad_weight's GEMM reads both of its operands and grad_input's GEMM reads the weight."""
        return Operand(self.payload_t, self.payload, self.scale_inv_t, self.scale_inv, self.granularity)


class GranularityKernels:
    """How one granularity casts operands and multiplies them: here any, by its definition in plain torch, `maxima`, `spread`, `quantize`
    and the FP32 product of the values."""

    def cast(self, x: torch.Tensor, slot: CastScales, cast: Cast, row: bool, col: bool, combine: Combine | None) -> Operand:
        """`x` [M, K] in the requested layouts; see `cast_operand`."""
        slot.record(x)
        nothing = x.new_empty(0, dtype=torch.float32)
        payload, scale_inv = _quantized(x, cast) if row else (None, nothing)
        payload_t, scale_inv_t = _quantized(x.t(), cast) if col else (None, nothing)
        return Operand(payload, payload_t, scale_inv, scale_inv_t, cast.granularity)

    def weight(self, payload: torch.Tensor, scales: Scales, cast: Cast, transpose: bool) -> Operand:
        """A stored weight [N, K] in one layout; see `LayerGemm.weight`."""
        values = dequantize(payload, scales[0])
        codes, scale_inv = _quantized(values.t() if transpose else values, cast)
        return Operand(codes, None, scale_inv, scale_inv, cast.granularity)

    def multiply(self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        """`a b^T + bias` [M, N] of `dtype`, from both operands' `payload`."""
        _say_once(str(a.granularity), str(b.granularity))
        out = (_values(a) @ _values(b).t()).to(dtype)
        return out if bias is None else out + bias


def _quantized(x: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload and one scale_inv per set of elements; NaN where a set is not finite."""
    amax = cast.granularity.maxima(x)
    scale = cast.scaling.next_scale(amax.unsqueeze(-1), cast.format.max, 1.0)
    payload = quantize(x, cast.granularity.spread(scale, x.shape), cast.format).contiguous()
    return payload, inverse(scale).masked_fill(~amax.isfinite(), float("nan"))


def _values(operand: Operand) -> torch.Tensor:
    """Return the dequantized values, FP32 [M, K]."""
    return dequantize(operand.codes, operand.element_scale_inv)


@functools.cache
def _say_once(*granularities: str) -> None:
    warnings.warn(
        f"there is no kernel for operands of granularity {' and '.join(granularities)}: casts and products run in plain torch, with the "
        "same numbers but slower than BF16",
        stacklevel=2,
    )


class _Tensorwise(GranularityKernels):
    """One scale per tensor: kernels cast and multiply, and one read writes both layouts."""

    def cast(self, x: torch.Tensor, slot: CastScales, cast: Cast, row: bool, col: bool, combine: Combine | None) -> Operand:
        scale, amax_slot = slot.scale, slot.amax
        amax = None
        if scale is None and (combine is not None or own_rule(cast)):
            amax = ops.amax(x) if combine is None else combine(ops.amax(x))
            if amax_slot is not None:
                amax_slot.copy_(torch.maximum(amax_slot, amax))
            scale, amax_slot = just_in_time_scale(cast, amax), None
        place = scalar_pool.try_take(x.device)
        payload, payload_t, new_scale_inv, _ = ops.cast_transpose(
            x, scale=scale, amax_slot=amax_slot, dtype=cast.format.dtype, row=row, col=col, scale_inv_slot=place
        )
        scale_inv = new_scale_inv if place is None else place
        if amax is not None:
            scale_inv = torch.add(scale_inv, amax, alpha=0)  # NaN on every rank if any rank's share is not finite
        return Operand(payload if row else None, payload_t if col else None, scale_inv, scale_inv, TENSORWISE)

    def weight(self, payload: torch.Tensor, scales: Scales, cast: Cast, transpose: bool) -> Operand:
        multiplier, scale_inv = scales
        dtype = cast.format.dtype
        if payload.dtype == dtype:
            return Operand(ops.transpose(payload) if transpose else payload, None, scale_inv, scale_inv, TENSORWISE)
        if not transpose:
            return Operand(ops.cast(payload, multiplier, dtype), None, scale_inv, scale_inv, TENSORWISE)
        place = scalar_pool.try_take(payload.device)  # unused; it saves the launch that would allocate the kernel's own
        cast_weight = ops.cast_transpose(payload, scale=multiplier, amax_slot=None, dtype=dtype, col=True, scale_inv_slot=place)
        return Operand(cast_weight[1], None, scale_inv, scale_inv, TENSORWISE)

    def multiply(self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        return ops.scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, bias, dtype, fast_accum=fast)  # type: ignore[arg-type]


class _Blocks(GranularityKernels):
    """One just-in-time scale per block: `ops.block_cast` casts and `ops.block_scaled_mm` multiplies; see `msamp.numerics.block_scale`.

    A weight that is stored in FP8 is used as it is, with its one scale repeated for every block: rounding it again would lose more than
    block scales gain.
    """

    def cast(self, x: torch.Tensor, slot: CastScales, cast: Cast, row: bool, col: bool, combine: Combine | None) -> Operand:
        rule, block = name_of(cast.scaling), _block(cast)
        if rule is None or not has_kernel(block.rows, block.columns):
            return super().cast(x, slot, cast, row, col, combine)
        payload, table, payload_t, table_t = ops.block_cast(
            x, None, slot.amax, rows=block.rows, columns=block.columns, dtype=cast.format.dtype, scale_rule=rule, row=row, col=col
        )
        return Operand(payload if row else None, payload_t if col else None, table, table_t, block)

    def weight(self, payload: torch.Tensor, scales: Scales, cast: Cast, transpose: bool) -> Operand:
        rule, block, dtype = name_of(cast.scaling), _block(cast), cast.format.dtype
        if payload.dtype == dtype:
            stored = ops.transpose(payload) if transpose else payload
            table = scales[0].expand(block.scales_shape(stored.shape)).contiguous()
            return Operand(stored, None, table, table, block)
        if rule is None or not has_kernel(block.rows, block.columns):
            return super().weight(payload, scales, cast, transpose)
        blocks = ops.block_cast(
            payload,
            scales[0],
            None,
            rows=block.rows,
            columns=block.columns,
            dtype=dtype,
            scale_rule=rule,
            row=not transpose,
            col=transpose,
        )
        stored, table = blocks[2:] if transpose else blocks[:2]
        return Operand(stored, None, table, table, block)

    def multiply(self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        left, right = a.granularity, b.granularity
        if not (isinstance(left, Block) and isinstance(right, Block) and have_product(left, right)):
            return super().multiply(a, b, bias, dtype, fast)
        blocks = {"a_block": (left.rows, left.columns), "b_block": (right.rows, right.columns)}
        return ops.block_scaled_mm(a.codes, b.codes, a.scale_inv, b.scale_inv, bias, dtype, **blocks)


def _block(cast: Cast) -> Block:
    assert isinstance(cast.granularity, Block)
    return cast.granularity


_DEFINITION = GranularityKernels()
_KERNELS: dict[type, GranularityKernels] = {type(TENSORWISE): _Tensorwise(), Block: _Blocks()}


def kernels_of(granularity: Granularity) -> GranularityKernels:
    """Return the implementation of a granularity's casts and products."""
    return _KERNELS.get(type(granularity), _DEFINITION)


def cast_operand(
    x: torch.Tensor,
    slot: CastScales,
    cast: Cast,
    *,
    row: bool = True,
    col: bool = False,
    combine: Combine | None = None,
) -> Operand:
    """Cast one tensor of a linear layer to FP8, with the scale in `slot` or a just-in-time one, and record its amax in `slot`.

    Args:
        x: [M, K] BF16, FP16 or FP32.
        slot: the scale, where the amax goes, and an optional watch, which is called with the result.
        cast: format, rule and granularity.
        row, col: whether to return the payload and its transpose.
        combine: turns a just-in-time amax (FP32, 0-dim) into the amax of all ranks that share it; a scale in `slot` is shared already.

    Returns:
        The operand. Each scale_inv is a copy, and is NaN where the values that it scales are not finite.
    """
    if cast.format is BF16:
        wide = x.to(BF16.dtype)
        return Operand.tensorwise(wide, scale_inv=x.new_empty(0, dtype=torch.float32), payload_t=wide.t())
    operand = kernels_of(cast.granularity).cast(x, slot, cast, row, col, combine)
    if slot.watch is not None:
        seen, x2d = (operand, x) if row else (operand.transposed(), x.t())
        slot.watch(x2d, seen.codes, seen.element_scale_inv)
    return operand


class RowProduct(NamedTuple):
    """A GEMM whose left operand comes later, perhaps in pieces: each row of the product depends on one row of that operand. One scale per
    tensor.

    Attributes:
        scale_inv: FP32 0-dim, of the left operand.
        right: [N, K].
        bias: [N] of `dtype`, or None.
        dtype: of the product.
        fast: `Product.fast`.
        tallies: of this product (`LayerGemm.tallies`).
    """

    scale_inv: torch.Tensor
    right: Operand
    bias: torch.Tensor | None
    dtype: torch.dtype
    fast: bool
    tallies: tuple[torch.Tensor, ...] = ()

    def of(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the product [M, N] of all rows, FP8 or BF16 [M, K]."""
        if codes.dtype == BF16.dtype:
            return bf16_linear(codes, self.right.codes, self.bias).to(self.dtype)
        out = ops.scaled_mm(codes, self.right.codes, self.scale_inv, self.right.scale_inv, self.bias, self.dtype, fast_accum=self.fast)
        return self._tallied(out, codes)

    def empty(self, codes: torch.Tensor, rows: int) -> torch.Tensor:
        """Return memory for the product of `rows` rows such as `codes`."""
        return torch.empty(rows, self.right.codes.shape[0], dtype=self.dtype, device=codes.device)

    def write(self, out: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the product of some rows to `out`, the same rows of `empty`."""
        ops.scaled_mm_(out, codes, self.right.codes, self.scale_inv, self.right.scale_inv, self.bias, fast_accum=self.fast)
        self._tallied(out, codes)

    def _tallied(self, out: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        if self.tallies:
            tally_product_(self.tallies, out, codes, self.right.codes, self.scale_inv * self.right.scale_inv, self.bias)
        return out


_IN_BF16 = Gemms.of(Cast(BF16), Cast(BF16), Cast(BF16))
_UNSCALED = CastScales(None, None, None)


class LayerGemm(NamedTuple):
    """One linear layer in this step: how its tensors are cast, the current scales, and its three GEMMs; all in BF16 if FP8 gains nothing.

    Attributes:
        gemm: the casts.
        x, grad, wire: slots of the input, the grad_output and the partial sums; `wire` is None where no partial sums are sent in FP8.
        scales: the factors from the stored weight to FP8 and back, FP32 0-dim.
        channels: scales of the input's channels, which divide the columns of the weight (`msamp.nn.channel_scales`); None without.
        tallies: by product, where to compare its sums with exact ones (`LinearScaling.sums`); None: nowhere.
        more: the `scales` of layers that read the same input, whose weights follow below this one's in one GEMM, with a common scale.
    """

    gemm: Gemms
    x: CastScales
    grad: CastScales
    wire: CastScales | None
    scales: Scales
    channels: ChannelSlots | None = None
    tallies: Mapping[str, tuple[torch.Tensor, ...]] | None = None
    more: tuple[Scales, ...] = ()

    @property
    def sums(self) -> CastScales:
        """`wire`, for a layer that has one."""
        assert self.wire is not None
        return self.wire

    @classmethod
    def of(cls, scaling: LinearScaling, weight: ScalingTensor) -> "LayerGemm":
        """Take the layer's current scales. Amaxes are recorded while gradients are enabled."""
        if scaling.in_bf16:
            return cls(_IN_BF16, _UNSCALED, _UNSCALED, None, scaling.weight_scales(weight))
        x, grad, *wire = scaling.slots(record=torch.is_grad_enabled())
        channels = scaling.channel_slots(record=torch.is_grad_enabled())
        tallies = scaling.tallies if torch.is_grad_enabled() else None
        return cls(scaling.gemm, x, grad, wire[0] if wire else None, scaling.weight_scales(weight), channels, tallies)

    @property
    def in_bf16(self) -> bool:
        """Whether the operands are BF16, and transposes are views."""
        return self.gemm is _IN_BF16

    @property
    def x_dtype(self) -> torch.dtype:
        """torch dtype of the input's payload."""
        return self.gemm.input.format.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """torch dtype of the grad_output's payload."""
        return self.gemm.grad_output.format.dtype

    @property
    def grad_just_in_time(self) -> bool:
        """Whether the grad_output's scale always comes from its own amax, which the kernel that produces it can measure."""
        return not self.gemm.grad_output.scaling.window

    @property
    def channel_scale(self) -> torch.Tensor | None:
        """Scales of the input's channels, FP32 [K]; None without, or while they are all 1."""
        return None if self.channels is None else self.channels.scale

    def weight(self, payload: torch.Tensor, *more: torch.Tensor, transpose: bool = False) -> Operand:
        """Return the FP8 weight from the stored payload [N, K], or from those of all layers of a joined GEMM. Its `payload` is [N, K],
        divided by the scales of the input's channels, or [K, N] with `transpose`, for grad_input, which does not sum over the channels."""
        if self.gemm is _IN_BF16:
            pairs = zip((payload, *more), (self.scales, *self.more), strict=True)
            joined = torch.cat([part.to(BF16.dtype, copy=True).mul_(scale_inv) for part, (_, scale_inv) in pairs])
            return Operand.tensorwise(joined.t() if transpose else joined, scale_inv=self.scales[1])
        if more:
            dtype, (multipliers, scale_invs) = self.gemm.weight.format.dtype, map(list, zip(self.scales, *self.more, strict=True))
            codes, common = ops.join_weights([payload, *more], multipliers, scale_invs, dtype, transpose=transpose)
            return Operand.tensorwise(codes, scale_inv=common)
        if self.channel_scale is not None and not transpose:
            dtype, (multiplier, scale_inv) = self.gemm.output.right.format.dtype, self.scales
            codes = ops.cast_columns(payload, None if payload.dtype == dtype else multiplier, self.channel_scale, dtype)
            return Operand.tensorwise(codes, scale_inv=scale_inv)
        cast = self.gemm.grad_input.right if transpose else self.gemm.output.right
        return kernels_of(cast.granularity).weight(payload, self.scales, cast, transpose)

    def weight_cast(self, weight: ScalingTensor) -> tuple[torch.Tensor, Operand]:
        """Return the cast of a weight that is stored in a wider format, to measure it: FP32 [N, K], the values that are cast, which are
        divided by the scales of the input's channels, and the operand."""
        values = weight.dequantize(torch.float32)
        return values if self.channel_scale is None else values / self.channel_scale, self.weight(weight.payload)

    def output(self, x: Operand, w: Operand, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """`x W^T + b` [M, N] of `dtype` from the input [M, K], the weight [N, K] and the bias [N] or None."""
        product = multiply(x, w, None if bias is None else bias.to(dtype), dtype, self.gemm.output)
        return product if self.tallies is None else self._tallied("output", product, x, w, None if bias is None else bias.to(dtype))

    def output_rows(self, scale_inv: torch.Tensor, w: Operand, bias: torch.Tensor | None, dtype: torch.dtype) -> RowProduct:
        """Like `output`, for a per-tensor-scaled input whose FP8 data is passed in later."""
        cast_bias = None if bias is None else bias.to(dtype)
        return RowProduct(scale_inv, w, cast_bias, dtype, self.gemm.output.fast, self._tallies("output"))

    def grad_input_rows(self, scale_inv: torch.Tensor, w: Operand, dtype: torch.dtype) -> RowProduct:
        """Like `grad_input`, for a per-tensor-scaled grad_output whose FP8 data is passed in later."""
        return RowProduct(scale_inv, w, None, dtype, self.gemm.grad_input.fast, self._tallies("grad_input"))

    def grad_input(self, g: Operand, w: Operand, dtype: torch.dtype) -> torch.Tensor:
        """`g W` [M, K] of `dtype` from the grad_output [M, N] and the weight's transpose [K, N]."""
        product = multiply(g, w, None, dtype, self.gemm.grad_input)
        return product if self.tallies is None else self._tallied("grad_input", product, g, w, None)

    def grad_weight(self, g: Operand, x: Operand, dtype: torch.dtype, channel_scale: torch.Tensor | None = None) -> torch.Tensor:
        """`g^T x` [N, K] of `dtype` from the transposes of grad_output [N, M] and input [K, M]. `channel_scale` is the one used in forward,
        by which the input's channels were multiplied; the product is divided by it, exactly."""
        left, right = g.transposed(), x.transposed()
        product = multiply(left, right, None, dtype, self.gemm.grad_weight)
        if self.tallies is not None:
            self._tallied("grad_weight", product, left, right, None)
        return product if channel_scale is None else ops.cast_columns(product, None, channel_scale, dtype)

    def _tallies(self, name: str) -> tuple[torch.Tensor, ...]:
        return () if self.tallies is None else self.tallies[name]

    def _tallied(self, name: str, product: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None) -> torch.Tensor:
        """Compare a product with its exact sums, if it has one scale per tensor, and return it."""
        if self.gemm.tensorwise:
            tally_product_(self._tallies(name), product, a.codes, b.codes, a.scale_inv * b.scale_inv, bias)
        return product


def multiply(a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, product: Product) -> torch.Tensor:
    """`a b^T + bias` [M, N] of `dtype` from two operands with payloads [M, K] and [N, K], and a bias [N] of `dtype` or None."""
    if a.payload is not None and a.payload.dtype == BF16.dtype:
        return bf16_linear(a.payload, b.codes, bias).to(dtype)
    alike = type(a.granularity) is type(b.granularity)
    return (kernels_of(a.granularity) if alike else _DEFINITION).multiply(a, b, bias, dtype, product.fast)
