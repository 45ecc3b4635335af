"""Rotary position embedding of a packed QKV projection, and its gradient, cast for the projection's GEMMs."""

import torch

from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.cast_transpose import _store
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax


def check_tables(cos: torch.Tensor, sin: torch.Tensor, rows: tuple[int, ...], head_dim: int) -> None:
    """Raise a ValueError unless cos and sin have one of these numbers of rows, and r columns, r even and at most the width of a head."""
    lengths = " or ".join(map(str, rows))
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != cos.shape or table.ndim != 2 or table.shape[0] not in rows or table.shape[1] % 2 or table.shape[1] > head_dim:
            raise ValueError(
                f"{name} is {tuple(table.shape)}; it must be [{lengths}, r] with r even and at most the {head_dim} channels of a head, "
                "the same for cos and sin: slice the tables to the sequence"
            )


def table_rows(outer: int, inner: int, apart: bool) -> tuple[int, ...]:
    """Return the possible numbers of rows of cos and sin for a projection [outer, inner, width]."""
    return (inner, outer * inner) if apart else (outer,)


def token_tables(table: torch.Tensor, inner: int, apart: bool) -> torch.Tensor:
    """Return cos or sin in a form that broadcasts over [outer, inner, ...]: [outer or 1, inner or 1, r]."""
    return table.view(len(table) // max(1, inner), inner, table.shape[1]) if apart else table[:, None]


def grouped_heads(packed: torch.Tensor, heads: int, groups: int, apart: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a packed projection [.., (heads + 2 groups) * d]: queries [.., groups, heads / groups, d], keys and values
    [.., groups, 1, d]."""
    d = packed.shape[-1] // (heads + 2 * groups)
    if apart:
        query, key, value = packed.split([heads * d, groups * d, groups * d], dim=-1)
        return query.unflatten(-1, (groups, -1, d)), key.unflatten(-1, (groups, 1, d)), value.unflatten(-1, (groups, 1, d))
    query, key, value = packed.unflatten(-1, (groups, -1, d)).split([heads // groups, 1, 1], dim=-2)
    return query, key, value


def head_width(qkv: torch.Tensor, heads: int, groups: int) -> int:
    """Return the width d of a head in a packed projection [s, b, (heads + 2 groups) * d]; ValueError if the shape does not match."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads cannot be divided into {groups} query groups; heads must be a multiple of groups")
    slots = heads + 2 * groups
    if qkv.ndim != 3 or qkv.shape[2] % (2 * slots):
        raise ValueError(
            f"qkv is {tuple(qkv.shape)}; it must be [sequence, batch, {slots} x d] with d even: {heads} queries, {groups} keys and values"
        )
    return qkv.shape[2] // slots


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotated first r channels of x [.., groups, n, d] in FP32, for cos and sin as `token_tables` returns them."""
    cos, sin, half = cos[..., None, None, :].float(), sin[..., None, None, :].float(), cos.shape[-1] // 2
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    cos1, cos2, sin1, sin2 = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    return torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], dim=-1)


def rotary_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int, *, apart: bool = False) -> None:
    """Rotate the queries and keys of a packed projection in place (Su et al., 2021, in the "rotate half" form).

    The first r channels x of each query and key become x[i] cos[i] - x[i + r/2] sin[i] for i < r/2 and
    x[i] cos[i] + x[i - r/2] sin[i] above, in FP32 and rounded once; the other channels and the values do not change.

    Args:
        qkv: [s, b, (heads + 2 groups) * d], contiguous, BF16, FP16 or FP32, in Megatron's order: for each query group its
            heads / groups queries, its key, its value, each d wide.
        cos, sin: FP32 or the dtype of `qkv`, [s, r], r even and at most d; r = 0 rotates nothing.
        heads, groups: number of heads of queries, and of keys and values.
        apart: Hugging Face's layout: `qkv` is [b, s, (heads + 2 groups) * d] with all queries, all keys, all values, and the tables
            have a row for each position, [s, r], or for each token, [b * s, r].

    Raises:
        ValueError: if shapes do not match.
    """
    d = head_width(qkv, heads, groups)
    check_tables(cos, sin, table_rows(qkv.shape[0], qkv.shape[1], apart), d)
    tables = token_tables(cos, qkv.shape[1], apart), token_tables(sin, qkv.shape[1], apart)
    for part in grouped_heads(qkv, heads, groups, apart)[:2]:
        part[..., : cos.shape[1]] = _rotate(part[..., : cos.shape[1]], *tables).to(qkv.dtype)


def rotary_cast(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    groups: int,
    scales: torch.Tensor | None,
    amax_slots: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    scale_inv_slots: torch.Tensor | None = None,
    center: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys of a packed projection, and cast queries, keys and values to FP8 for FP8 attention.

    The values that are cast equal `rotary_`'s, rounded to the dtype of `qkv`.

    Args:
        qkv, cos, sin, heads, groups: as in `rotary_`; `qkv` is only read.
        scales: FP32 [3], powers of two, of queries, keys and values; None uses just-in-time scales.
        amax_slots: FP32 [3], contiguous, raised in place to the three amaxes (+inf if not finite); None does not measure them.
        dtype: an FP8 dtype.
        scale_inv_slots: FP32 [3], contiguous, containing 0, for the three scale_invs.
        center: FP32 [b, groups, d], contiguous: subtracted from the values in FP32 before their cast; None subtracts nothing.

    Returns:
        Queries [s, b, heads, d], keys and values [s, b, groups, d], contiguous, of `dtype`; the three scale_invs, FP32 [3], NaN for a
        tensor that is not finite, or FP32 [0] if slots are given.

    Raises:
        ValueError: if shapes do not match.
    """
    rotated = qkv.clone(memory_format=torch.contiguous_format)
    rotary_(rotated, cos, sin, heads, groups)
    d, (s, b, _), fmt = head_width(qkv, heads, groups), qkv.shape, of_dtype(dtype)
    grouped = rotated.view(s, b, groups, heads // groups + 2, d)
    parts = (grouped[:, :, :, :-2].reshape(s, b, heads, d), grouped[:, :, :, -2], grouped[:, :, :, -1])
    if center is not None:
        parts = (*parts[:2], parts[2].float() - center)
    taken = torch.stack([amax(part) for part in parts])
    if scales is None:
        scales = scale_from_amax(taken, fmt.max)
    if amax_slots is not None:
        amax_slots.copy_(torch.maximum(amax_slots, taken))
    query, key, value = (quantize(part, scale, fmt).contiguous() for part, scale in zip(parts, scales, strict=True))
    scale_invs = inverse(scales).masked_fill(~taken.isfinite(), float("nan"))
    if scale_inv_slots is not None:
        scale_inv_slots.copy_(scale_invs)
        scale_invs = scale_invs.new_empty(0)
    return query, key, value, scale_invs


def rotary_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    colsum: bool = False,
    scale_inv_slot: torch.Tensor | None = None,
    scale_invs: torch.Tensor | None = None,
    ds: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradient of the packed projection from the gradients of attention's inputs: rotate back, pack, and cast for the GEMMs.

    Args:
        dq: [s, b, heads, d] BF16, FP16, FP32 or E5M2, of any strides.
        dk, dv: [s, b, groups, d] of its dtype, of any strides. The first token of dq, and of dk and dv, may be missing: it is then zero.
        cos, sin: as in `rotary_`.
        scale: FP32, 0-dim, a power of two; None uses a just-in-time scale from the amax of the gradient.
        amax_slot: FP32, 0-dim, raised in place to the amax of the gradient (+inf if not finite); None does not measure it.
        dtype: of the gradient; a wide dtype gives a plain gradient without transpose and scale_inv.
        colsum: also return the column sums of the gradient before the cast: the gradient of the projection's bias.
        scale_inv_slot: FP32, 0-dim, as in `cast_transpose`.
        scale_invs: FP32 [3], the scale_invs of dq, dk and dv from FP8 attention; None if they are not scaled.
        ds: FP32 [s, b, heads], contiguous, times the first part of `sink` is added to dq (`reference.attention_sink`); None adds nothing.
        sink: FP32 [3, b, groups, d], contiguous, with `ds`: the first token's key, and what is added to its dk and dv.
        apart: as in `rotary_`: dq is [b, s, heads, d], dk and dv are [b, s, groups, d], and none lacks a token.

    Returns:
        Gradient g [s * b, (heads + 2 groups) * d] in the order of `rotary_` and its transpose, of `dtype`; scale_inv FP32, 0-dim,
        NaN if g is not finite; column sums of parts of the rows, FP32 [parts, (heads + 2 groups) * d], for `sum_parts`. Results that are
        not requested are empty, and so is scale_inv if a slot is given.

    Raises:
        ValueError: if shapes do not match.
    """
    r, (outer, b, heads, d) = cos.shape[1], dq.shape
    s = outer if apart else cos.shape[0]
    groups = dk.shape[2]
    check_tables(cos, sin, table_rows(s, b, apart), d)
    parts = [torch.cat([part.float().new_zeros(s - len(part), *part.shape[1:]), part.float()]) for part in (dq, dk, dv)]
    if scale_invs is not None:
        parts = [part * scale_inv for part, scale_inv in zip(parts, scale_invs, strict=True)]
    if ds is not None and sink is not None:
        parts[0] += ds[..., None] * sink[0].repeat_interleave(heads // groups, 1)
        parts[1][0] += sink[1]
        parts[2][0] += sink[2]
    g = dq.new_empty(s, b, (heads + 2 * groups) * d, dtype=torch.float32)
    # `_rotate` computes its transpose with the halves of sin swapped and negated.
    tables = token_tables(cos, b, apart), token_tables(-sin.roll(r // 2, -1), b, apart)
    for i, (of_part, part) in enumerate(zip(grouped_heads(g, heads, groups, apart), parts, strict=True)):
        of_part.copy_(part.reshape(of_part.shape))
        if i < 2:
            of_part[..., :r] = _rotate(of_part[..., :r], *tables)
    return _store(g.flatten(0, 1), scale, amax_slot, dtype, dtype.itemsize == 1, colsum, scale_inv_slot)
