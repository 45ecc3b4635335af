"""The launch before an Adam update, which computes the numbers per tensor: step count, bias correction, bounds and scales.

Twin: the first half of `msamp.kernels.reference.adamw.adamw`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from msamp.kernels.reference.adamw import Hyper
from msamp.kernels.tables import numbered
from msamp.kernels.triton.pack import _pointer
from msamp.numerics.stochastic_rounding import SPREAD


class AdamWRow(NamedTuple):
    """A parameter: its number of elements, addresses (0 for a missing tensor), columns in `amaxes` and `kept`, and the key and first index
    for stochastic rounding."""

    numel: int
    grad: int
    m: int
    v: int
    master: int
    weight: int
    index: int
    place: int
    step: int
    grad_scale_inv: int
    m_scale_inv: int
    v_scale_inv: int
    master_scale_inv: int
    weight_scale_inv: int
    key: int
    offset: int


class Derived(NamedTuple):
    """The columns after a `Hyper`: logarithms of both betas, and the largest step in units of lr."""

    log_beta1: int
    log_beta2: int
    largest_step: int


class AdamWScalars(NamedTuple):
    """The numbers of a parameter that this launch passes to the update's launch, FP32: factors of loaded values, scales of stored values,
    and Adam's numbers. All scales are powers of two, so their products with other factors are exact.

    `g_factor` is the gradient's scale_inv times the clip coefficient, `v_factor` v's scale_inv times beta2, `p_factor` the master's
    scale_inv times 1 - lr weight_decay (if decoupled), and `w_factor` the ratio of the weight's scale to the master's. `m_new` to `p_new`
    are the scale_invs of the stored values, and `v_floor` is the smallest positive v in units of its payload, or 0 if no element ever had a
    gradient. `weight` is the gradient's weight in m, `bound` the limit of the quotient of m and its denominator, and `turn` the bits that
    the step adds to all random words."""

    g_factor: int
    m_old: int
    m_scale: int
    m_new: int
    v_factor: int
    v_scale: int
    v_new: int
    v_floor: int
    p_factor: int
    p_scale: int
    p_new: int
    w_factor: int
    weight_decay: int
    weight: int
    w2: int
    correction: int
    eps: int
    step_size: int
    correction_inverse: int
    bound: int
    turn: int


COLUMNS, SCALARS = 1 + len(AdamWRow._fields), len(AdamWScalars._fields)
ROW, SCALAR = tl.constexpr(numbered(AdamWRow)), tl.constexpr(numbered(AdamWScalars, 0))
HYPER, DERIVED = tl.constexpr(numbered(Hyper, 0)), tl.constexpr(numbered(Derived, len(Hyper._fields)))
TURN = tl.constexpr(SPREAD)


@triton.jit
def _inverse(scale):
    return tl.div_rn(scale * 0.0 + 1.0, scale)


@triton.jit
def _new_scale(scale_inv_address, bound, MANTISSA: tl.constexpr):
    """Return the old scale_inv, and the new scale and scale_inv for a bound (`scale_from_amax`); store the new scale_inv."""
    old = bound * 0.0 + 1.0
    scale = old
    if MANTISSA != 23 and MANTISSA != 7:
        MAX_BITS: tl.constexpr = 0x43E00000 if MANTISSA == 3 else (0x47600000 if MANTISSA == 2 else 0x477FE000)
        old = tl.load(_pointer(scale_inv_address, 23, False))
        bits = bound.to(tl.int32, bitcast=True)
        exponent = (MAX_BITS >> 23) - (bits >> 23) - ((bits & 0x7FFFFF) > (MAX_BITS & 0x7FFFFF)).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        scale = tl.where((bound > 0) & (bound < float("inf")), scale, _inverse(old))
        tl.store(_pointer(scale_inv_address, 23, False), _inverse(scale))
    return old, scale, _inverse(scale)


@triton.jit(do_not_specialize=["parameters", "pieces"])
def _scalars_kernel(
    table, hyper, amaxes, parameters, kept, pieces, coefficient, usable, scalars,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    CLIP: tl.constexpr, DECOUPLED: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """Compute the numbers of one tensor: step count, bias correction, bounds and scales."""
    if tl.load(usable) == 0:
        return
    row = table + tl.program_id(0) * COLUMNS
    index = tl.load(row + ROW.value.index)
    place = tl.load(row + ROW.value.place)
    lr = tl.load(hyper + HYPER.value.lr)
    beta1 = tl.load(hyper + HYPER.value.beta1)
    beta2 = tl.load(hyper + HYPER.value.beta2)
    weight_decay = tl.load(hyper + HYPER.value.weight_decay)
    step_pointer = _pointer(tl.load(row + ROW.value.step), 23, False)
    step = tl.load(step_pointer) + 1.0
    tl.store(step_pointer, step)
    power1 = tl.exp(step.to(tl.float64) * tl.load(hyper + DERIVED.value.log_beta1))
    power2 = tl.exp(step.to(tl.float64) * tl.load(hyper + DERIVED.value.log_beta2))
    g_amax = tl.load(amaxes + index)
    p_amax = tl.load(amaxes + 3 * parameters + index)
    clip = 1.0
    if CLIP:
        clip = tl.load(coefficient)
        g_amax = g_amax * clip
    if not DECOUPLED:
        g_amax = g_amax + weight_decay.to(tl.float32) * p_amax
    b1 = beta1.to(tl.float32)
    b2 = beta2.to(tl.float32)
    w1 = (1.0 - beta1).to(tl.float32)
    w2 = (1.0 - beta2).to(tl.float32)
    m_bound = b1 * tl.load(amaxes + parameters + index) + w1 * g_amax
    v_bound = b2 * tl.load(amaxes + 2 * parameters + index) + w2 * (g_amax * g_amax)
    m_old, m_scale, m_new = _new_scale(tl.load(row + ROW.value.m_scale_inv), m_bound, M)
    v_old, v_scale, v_new = _new_scale(tl.load(row + ROW.value.v_scale_inv), v_bound, V)
    largest_step = tl.load(hyper + DERIVED.value.largest_step)
    p_old, p_scale, p_new = _new_scale(tl.load(row + ROW.value.master_scale_inv), 2.0 * p_amax, P)
    w_factor = 1.0
    if W != 0:
        w_bound = p_amax + tl.where(lr > 0, lr * largest_step, 0.0).to(tl.float32)
        w_bound = tl.where(w_bound < 2.0 * p_amax, w_bound, 2.0 * p_amax)  # `weight_bound`
        _, w_scale, _ = _new_scale(tl.load(row + ROW.value.weight_scale_inv), w_bound, W)
        w_factor = p_new * w_scale
    g_factor = clip
    if G != 23 and G != 7:
        g_factor = tl.load(_pointer(tl.load(row + ROW.value.grad_scale_inv), 23, False)) * clip
    p_factor = p_old
    if DECOUPLED:
        p_factor = p_old * (1.0 - lr * weight_decay).to(tl.float32)
    out = scalars + tl.program_id(0) * SCALARS
    tl.store(out + SCALAR.value.g_factor, g_factor)
    tl.store(out + SCALAR.value.m_old, m_old)
    tl.store(out + SCALAR.value.m_scale, m_scale)
    tl.store(out + SCALAR.value.m_new, m_new)
    tl.store(out + SCALAR.value.v_factor, v_old * b2)
    tl.store(out + SCALAR.value.v_scale, v_scale)
    tl.store(out + SCALAR.value.v_new, v_new)
    # From its bits: as a constant, BF16's 2^-133 would be FP64.
    SMALLEST: tl.constexpr = 0x3B000000 if V == 3 else (0x37800000 if V == 2 else (0x33800000 if V == 10 else 0x10000))
    tl.store(out + SCALAR.value.v_floor, tl.where(v_bound > 0, tl.full((), SMALLEST, tl.int32).to(tl.float32, bitcast=True), 0.0))
    tl.store(out + SCALAR.value.p_factor, p_factor)
    tl.store(out + SCALAR.value.p_scale, p_scale)
    tl.store(out + SCALAR.value.p_new, p_new)
    tl.store(out + SCALAR.value.w_factor, w_factor)
    tl.store(out + SCALAR.value.weight_decay, weight_decay.to(tl.float32))
    tl.store(out + SCALAR.value.weight, tl.where(w1 < 0.5, w1, (1.0 - w1) * -1.0))  # without beta1 -0, as for CUDA's lerp: a zero's sign
    tl.store(out + SCALAR.value.w2, w2)
    correction = tl.sqrt(1.0 - power2).to(tl.float32)
    tl.store(out + SCALAR.value.correction, correction)
    tl.store(out + SCALAR.value.eps, tl.load(hyper + HYPER.value.eps).to(tl.float32))
    tl.store(out + SCALAR.value.step_size, (-(lr / (1.0 - power1))).to(tl.float32))
    tl.store(out + SCALAR.value.correction_inverse, _inverse(correction))
    tl.store(out + SCALAR.value.bound, (largest_step * (1.0 - power1)).to(tl.float32))
    tl.store(out + SCALAR.value.turn, (step.to(tl.int64) * TURN).to(tl.int32).to(tl.float32, bitcast=True))
    for kind in range(3):
        tl.store(kept + kind * pieces + place, 0.0)
