"""AdamW with BF16 arithmetic over many tensors: one launch computes their scalars, and one reads and writes each element once.

Values are FP32 here and rounded to BF16 after every elementary operation, as torch does for BF16 tensors.
Twin: `msamp.kernels.reference.collage`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.adamw import Hyper
from msamp.kernels.reference.collage import VARIANTS
from msamp.kernels.tables import numbered, rows_of
from msamp.kernels.triton.pack import _payload, _pointer, _span, _value
from msamp.numerics.formats import of_dtype

BLOCK, CHUNK = 1024, 16384  # elements per iteration and per program


class CollageRow(NamedTuple):
    """A parameter: its number of elements, and addresses, 0 for a missing tensor."""

    numel: int
    grad: int
    m: int
    v: int
    weight: int
    weight_remainder: int
    v_remainder: int
    step: int


class CollageScalars(NamedTuple):
    """The numbers of a parameter from the first launch: the group's hyperparameters and bias corrections in BF16."""

    clip: int
    beta1: int
    w1: int
    beta2: int
    beta2_rest: int
    w2: int
    correction1: int
    correction2: int
    eps: int
    weight_decay: int
    step_size: int


COLUMNS, SCALARS = 1 + len(CollageRow._fields), len(CollageScalars._fields)
ROW, SCALAR, HYPER = tl.constexpr(numbered(CollageRow)), tl.constexpr(numbered(CollageScalars, 0)), tl.constexpr(numbered(Hyper, 0))


@triton.jit
def _rounded(x, HARDWARE: tl.constexpr):
    return _value(_payload(x, 7, HARDWARE), 7, HARDWARE)


@triton.jit
def _fast_two_sum(a, b, HARDWARE: tl.constexpr):
    x = _rounded(a + b, HARDWARE)
    return x, _rounded(b - _rounded(x - a, HARDWARE), HARDWARE)


@triton.jit
def _two_sum(a, b, HARDWARE: tl.constexpr):
    x = _rounded(a + b, HARDWARE)
    from_b = _rounded(x - a, HARDWARE)
    from_a = _rounded(x - from_b, HARDWARE)
    return x, _rounded(_rounded(a - from_a, HARDWARE) + _rounded(b - from_b, HARDWARE), HARDWARE)


@triton.jit
def _mul(x1, y1, x2, y2, HARDWARE: tl.constexpr):
    p = _rounded(x1 * x2, HARDWARE)
    e = _rounded(x1 * x2 - p, HARDWARE)  # the product of two BF16 numbers is exact in FP32
    cross = _rounded(_rounded(x1 * y2, HARDWARE) + _rounded(y1 * x2, HARDWARE), HARDWARE)
    return _fast_two_sum(p, _rounded(e + cross, HARDWARE), HARDWARE)


@triton.jit
def _remainder(raw, x, REST: tl.constexpr, HARDWARE: tl.constexpr):
    """`mcf.load_pair`: the remainder of `x` from its payload."""
    rest = _value(raw, REST, HARDWARE)
    if REST == 3:
        rest = _rounded(rest * _two_to(tl.maximum(_exponent(x), 17) - 16), HARDWARE)
    return rest


@triton.jit
def _remainder_payload(x, rest, REST: tl.constexpr, HARDWARE: tl.constexpr):
    """`mcf.remainder_payload`."""
    if REST == 3:
        half = _two_to(tl.minimum(_exponent(x) + 118, 135))
        limit = half - half * 0.0625 * ((x.to(tl.int32, bitcast=True) >> 16) & 1).to(tl.float32)
        units = rest * _two_to(270 - tl.maximum(_exponent(x), 17))
        rest = tl.clamp(units, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return _payload(rest, REST, HARDWARE)


@triton.jit
def _exponent(x):
    return (x.to(tl.int32, bitcast=True) >> 23) & 0xFF


@triton.jit
def _two_to(biased):
    """FP32 power of two by its biased exponent."""
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _power(base, exponent):
    """FP64 `base` to an int32 power below 2^24 (the limit of an FP32 counter), by squaring as in the twin."""
    result = base * 0.0 + 1.0
    for _ in range(24):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _put(out, x, HARDWARE: tl.constexpr):
    """Store an FP64 scalar as BF16, rounded via FP32 as in torch."""
    tl.store(out, _rounded(x.to(tl.float32), HARDWARE))


@triton.jit
def _scalars_kernel(
    table, hyper, coefficient, usable, scalars, CLIP: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """Compute the numbers of one tensor: its step count and, in BF16, the group's hyperparameters and bias corrections."""
    if tl.load(usable) == 0:
        return
    step_pointer = _pointer(tl.load(table + tl.program_id(0) * COLUMNS + ROW.value.step), 23, False)
    step = tl.load(step_pointer) + 1.0
    tl.store(step_pointer, step)
    out = scalars + tl.program_id(0) * SCALARS
    clip = step * 0.0 + 1.0
    if CLIP:
        clip = tl.load(coefficient)
    tl.store(out + SCALAR.value.clip, clip)
    beta1 = tl.load(hyper + HYPER.value.beta1)
    beta2 = tl.load(hyper + HYPER.value.beta2)
    _put(out + SCALAR.value.beta1, beta1, HARDWARE)
    _put(out + SCALAR.value.w1, 1.0 - beta1, HARDWARE)
    first = _rounded(beta2.to(tl.float32), HARDWARE)
    tl.store(out + SCALAR.value.beta2, first)
    _put(out + SCALAR.value.beta2_rest, beta2 - first.to(tl.float64), HARDWARE)
    _put(out + SCALAR.value.w2, 1.0 - beta2, HARDWARE)
    _put(out + SCALAR.value.correction1, 1.0 - _power(beta1, step.to(tl.int32)), HARDWARE)
    _put(out + SCALAR.value.correction2, 1.0 - _power(beta2, step.to(tl.int32)), HARDWARE)
    _put(out + SCALAR.value.eps, tl.load(hyper + HYPER.value.eps), HARDWARE)
    _put(out + SCALAR.value.weight_decay, tl.load(hyper + HYPER.value.weight_decay), HARDWARE)
    _put(out + SCALAR.value.step_size, -tl.load(hyper + HYPER.value.lr), HARDWARE)


@triton.jit(do_not_specialize=["skipped"])
def _collage_kernel(
    table, owners, skipped, scalars, usable,
    PAIR: tl.constexpr, KAHAN: tl.constexpr, PAIR_V: tl.constexpr, PUBLISHED: tl.constexpr, REST: tl.constexpr, CLIP: tl.constexpr,
    ALIGNED: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    if tl.load(usable) == 0:
        return
    row, first, left = _span(table, owners, skipped, COLUMNS, CHUNK, ALIGNED)
    own = scalars + tl.load(owners + tl.program_id(0)) * SCALARS
    # Load all numbers before the loop: the compiler does not know that the stores in it cannot change them.
    clip = tl.load(own + SCALAR.value.clip)
    beta1 = tl.load(own + SCALAR.value.beta1)
    w1 = tl.load(own + SCALAR.value.w1)
    beta2 = tl.load(own + SCALAR.value.beta2)
    beta2_rest = tl.load(own + SCALAR.value.beta2_rest)
    w2 = tl.load(own + SCALAR.value.w2)
    correction1 = tl.load(own + SCALAR.value.correction1)
    correction2 = tl.load(own + SCALAR.value.correction2)
    eps = tl.load(own + SCALAR.value.eps)
    weight_decay = tl.load(own + SCALAR.value.weight_decay)
    step_size = tl.load(own + SCALAR.value.step_size)
    g_pointer = _pointer(tl.load(row + ROW.value.grad), 7, ALIGNED) + first
    m_pointer = _pointer(tl.load(row + ROW.value.m), 7, ALIGNED) + first
    v_pointer = _pointer(tl.load(row + ROW.value.v), 7, ALIGNED) + first
    p_pointer = _pointer(tl.load(row + ROW.value.weight), 7, ALIGNED) + first
    p_rest_pointer = _pointer(tl.load(row + ROW.value.weight_remainder), REST, ALIGNED) + first
    v_rest_pointer = _pointer(tl.load(row + ROW.value.v_remainder), REST, ALIGNED) + first
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < left
        g = tl.load(g_pointer + at, mask=inside, other=0).to(tl.float32)
        m = tl.load(m_pointer + at, mask=inside, other=0).to(tl.float32)
        v = tl.load(v_pointer + at, mask=inside, other=0).to(tl.float32)
        p = tl.load(p_pointer + at, mask=inside, other=0).to(tl.float32)
        if CLIP:
            g = _rounded(g * clip, HARDWARE)
        m = _rounded(_rounded(m * beta1, HARDWARE) + _rounded(g * w1, HARDWARE), HARDWARE)
        squares = _rounded(_rounded(g * g, HARDWARE) * w2, HARDWARE)
        if PAIR_V:
            v_rest = _remainder(tl.load(v_rest_pointer + at, mask=inside, other=0), v, REST, HARDWARE)
            v, v_rest = _mul(beta2, beta2_rest, v, v_rest, HARDWARE)
            if PUBLISHED:
                v, lost = _fast_two_sum(v, squares, HARDWARE)
            else:
                v, lost = _two_sum(v, squares, HARDWARE)
            v, v_rest = _fast_two_sum(v, _rounded(v_rest + lost, HARDWARE), HARDWARE)
            tl.store(v_rest_pointer + at, _remainder_payload(v, v_rest, REST, HARDWARE), mask=inside)
        else:
            v = _rounded(_rounded(v * beta2, HARDWARE) + squares, HARDWARE)
        tl.store(m_pointer + at, _payload(m, 7, HARDWARE), mask=inside)
        tl.store(v_pointer + at, _payload(v, 7, HARDWARE), mask=inside)
        m_hat = _rounded(tl.div_rn(m, correction1), HARDWARE)
        v_hat = _rounded(tl.div_rn(v, correction2), HARDWARE)
        if PUBLISHED:
            root = _rounded(tl.sqrt_rn(_rounded(v_hat + eps, HARDWARE)), HARDWARE)
        else:
            root = _rounded(_rounded(tl.sqrt_rn(v_hat), HARDWARE) + eps, HARDWARE)
        decay = _rounded(p * weight_decay, HARDWARE)
        delta = _rounded(_rounded(_rounded(tl.div_rn(m_hat, root), HARDWARE) + decay, HARDWARE) * step_size, HARDWARE)
        if PAIR or KAHAN:
            p_rest = _remainder(tl.load(p_rest_pointer + at, mask=inside, other=0), p, REST, HARDWARE)
            if PAIR:
                p, lost = _fast_two_sum(p, delta, HARDWARE)
                p, p_rest = _fast_two_sum(p, _rounded(p_rest + lost, HARDWARE), HARDWARE)
            else:
                p, p_rest = _fast_two_sum(p, _rounded(p_rest + delta, HARDWARE), HARDWARE)
            tl.store(p_rest_pointer + at, _remainder_payload(p, p_rest, REST, HARDWARE), mask=inside)
        else:
            p = _rounded(p + delta, HARDWARE)
        tl.store(p_pointer + at, _payload(p, 7, HARDWARE), mask=inside)


def collage(tables, batch, hyper, update, coefficient, usable):
    """See the reference twin."""
    variant, none = VARIANTS[update], [0] * len(batch.grads)
    columns = (batch.grads, batch.ms, batch.vs, batch.masters, batch.weight_remainders, batch.v_remainders)
    grad, m, v, weight, weight_remainder, v_remainder = ([x.data_ptr() for x in column] or none for column in columns)
    rows = rows_of(
        CollageRow, numel=[g.numel() for g in batch.grads], grad=grad, m=m, v=v, weight=weight,
        weight_remainder=weight_remainder, v_remainder=v_remainder, step=[step.data_ptr() for step in batch.steps],
    )  # fmt: skip
    table, parts = tables.lay_out(("collage", update, batch.indices[0]), rows, len(columns), CHUNK)
    scalars = torch.empty(len(rows), SCALARS, device=tables.device, dtype=torch.float32)
    flag, hardware = usable.view(torch.uint8), tables.device.type == "cuda"
    common = {"CLIP": coefficient is not None, "HARDWARE": hardware, "COLUMNS": COLUMNS, "SCALARS": SCALARS, "enable_fp_fusion": False}
    _scalars_kernel[(len(rows),)](table, hyper, flag if coefficient is None else coefficient, flag, scalars, num_warps=1, **common)
    skipped = 0
    for owners, aligned in parts:
        _collage_kernel[(owners.numel(),)](
            table, owners, skipped, scalars, flag, PAIR=variant.weight == "pair", KAHAN=variant.weight == "kahan", PAIR_V=variant.pair_v,
            PUBLISHED=variant.published,
            REST=of_dtype(variant.remainder).mantissa_bits, ALIGNED=aligned, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4, **common,
        )  # fmt: skip
        skipped += owners.numel()
