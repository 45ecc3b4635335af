"""AdamW over many tensors: a launch for their scales, and one that reads and writes each element once.

Twin: `msamp.kernels.reference.adamw`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.adamw import Batch, Hyper, check_keys
from msamp.kernels.reference.store import NEAREST, Rounding
from msamp.kernels.tables import Tables, numbered, rows_of
from msamp.kernels.triton.pack import _pointer, _span
from msamp.kernels.triton.store import HASH_SPREAD, _hash, _read, _scaled, _store, _store_m, _store_v, _threshold
from msamp.numerics.formats import of_dtype
from msamp.numerics.stochastic_rounding import STEP
from msamp.numerics.tensor import ScalingTensor

BLOCK, CHUNK = 2048, 16384  # 8 elements a thread at a time: two of FP16's and one of FP32's widest accesses; elements a program
REGISTERS = 80  # a thread: three blocks of 256 threads share a multiprocessor, and nothing spills


class Row(NamedTuple):
    """A parameter: its number of elements, addresses (0 for an absent tensor), its columns in `amaxes` and `kept`, and its thresholds' key
    and first index."""

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


class Scalars(NamedTuple):
    """The numbers of a parameter that the launch for scales leaves: scale_inv of each tensor as read (old), the scale and scale_inv it is
    stored with (scale, new), and Adam's numbers. `p` is the master and `w` the weight beside it; `weight` is that of the gradient in m,
    `bound` the largest quotient of m and its denominator, and `turn` what the step adds to all thresholds."""

    g_old: int
    clip: int
    m_old: int
    m_scale: int
    m_new: int
    v_old: int
    v_scale: int
    v_new: int
    p_old: int
    p_scale: int
    p_new: int
    w_scale: int
    weight_decay: int
    remaining: int
    weight: int
    beta2: int
    w2: int
    correction: int
    eps: int
    step_size: int
    correction_inverse: int
    bound: int
    turn: int


COLUMNS, SCALARS = 1 + len(Row._fields), len(Scalars._fields)
ROW, SCALAR = tl.constexpr(numbered(Row)), tl.constexpr(numbered(Scalars, 0))
HYPER, DERIVED = tl.constexpr(numbered(Hyper, 0)), tl.constexpr(numbered(Derived, len(Hyper._fields)))
TURN = tl.constexpr(STEP)


@triton.jit
def _fma(x, y, z, HARDWARE: tl.constexpr):
    # The interpreter's own rounds twice.
    return tl.fma(x, y, z) if HARDWARE else (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)


@triton.jit
def _inverse(scale):
    return tl.div_rn(scale * 0.0 + 1.0, scale)


@triton.jit
def _new_scale(scale_inv_address, bound, MANTISSA: tl.constexpr):
    """The old scale_inv, and the new scale and its inverse, which replaces the old: `scale_from_amax` of a bound."""
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
    """Everything about one tensor that is a number: step count, bias correction, bounds and scales."""
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
    p_old, p_scale, p_new = _new_scale(tl.load(row + ROW.value.master_scale_inv), 2.0 * p_amax, P)
    w_scale = p_scale
    if W != 0:
        _, w_scale, _ = _new_scale(tl.load(row + ROW.value.weight_scale_inv), 2.0 * p_amax, W)
    g_old = 1.0
    if G != 23 and G != 7:
        g_old = tl.load(_pointer(tl.load(row + ROW.value.grad_scale_inv), 23, False))
    out = scalars + tl.program_id(0) * SCALARS
    tl.store(out + SCALAR.value.g_old, g_old)
    tl.store(out + SCALAR.value.clip, clip)
    tl.store(out + SCALAR.value.m_old, m_old)
    tl.store(out + SCALAR.value.m_scale, m_scale)
    tl.store(out + SCALAR.value.m_new, m_new)
    tl.store(out + SCALAR.value.v_old, v_old)
    tl.store(out + SCALAR.value.v_scale, v_scale)
    tl.store(out + SCALAR.value.v_new, v_new)
    tl.store(out + SCALAR.value.p_old, p_old)
    tl.store(out + SCALAR.value.p_scale, p_scale)
    tl.store(out + SCALAR.value.p_new, p_new)
    tl.store(out + SCALAR.value.w_scale, w_scale)
    tl.store(out + SCALAR.value.weight_decay, weight_decay.to(tl.float32))
    tl.store(out + SCALAR.value.remaining, (1.0 - lr * weight_decay).to(tl.float32))
    tl.store(out + SCALAR.value.weight, tl.where(w1 < 0.5, w1, w1 - 1.0))
    tl.store(out + SCALAR.value.beta2, b2)
    tl.store(out + SCALAR.value.w2, w2)
    correction = tl.sqrt(1.0 - power2).to(tl.float32)
    tl.store(out + SCALAR.value.correction, correction)
    tl.store(out + SCALAR.value.eps, tl.load(hyper + HYPER.value.eps).to(tl.float32))
    tl.store(out + SCALAR.value.step_size, (-(lr / (1.0 - power1))).to(tl.float32))
    tl.store(out + SCALAR.value.correction_inverse, _inverse(correction))
    tl.store(out + SCALAR.value.bound, (tl.load(hyper + DERIVED.value.largest_step) * (1.0 - power1)).to(tl.float32))
    tl.store(out + SCALAR.value.turn, ((step.to(tl.int64) * TURN) & 0xFFFF).to(tl.float32))
    for kind in range(3):
        tl.store(kept + kind * pieces + place, 0.0)


@triton.jit
def _quotient(x, y, y_inverse, HARDWARE: tl.constexpr):
    """x / y correctly rounded, for one y of many x and no underflow: what the division itself would do, without asking."""
    q = x * y_inverse
    q = _fma(_fma(-y, q, x, HARDWARE), y_inverse, q, HARDWARE)
    return _fma(_fma(-y, q, x, HARDWARE), y_inverse, q, HARDWARE)


@triton.jit
def _averages(g, m, v, p, weight_decay, remaining, weight, beta2, w2, DECOUPLED: tl.constexpr, HARDWARE: tl.constexpr):
    """New m and v, and p after its decay: `adam_` of the twin, the numbers as `_scalars_kernel` leaves them."""
    if DECOUPLED:
        p = p * remaining
    else:
        g = _fma(weight_decay, p, g, HARDWARE)
    m = _fma(weight, g - m, tl.where(weight > 0, m, g), HARDWARE)
    v = v * beta2
    # torch multiplies in another order on a CPU than on a GPU, here and below.
    v = _fma(w2, g * g, v, HARDWARE) if HARDWARE else _fma(w2 * g, g, v, HARDWARE)
    return m, v, p


@triton.jit
def _within(x, top):
    return tl.maximum(tl.minimum(x, top, propagate_nan=tl.PropagateNan.ALL), -top, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _adam(
    g, m, v, p, weight_decay, remaining, weight, beta2, w2, correction, correction_inverse, eps, step_size, bound,
    DECOUPLED: tl.constexpr, BOUNDED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """New m, v and p: all of `adam_`, to the bit."""
    m, v, p = _averages(g, m, v, p, weight_decay, remaining, weight, beta2, w2, DECOUPLED, HARDWARE)
    root = tl.minimum(tl.sqrt_rn(v), 3.4028234663852886e38)
    d = _quotient(root, correction, correction_inverse, HARDWARE) + eps
    used = m
    if BOUNDED:
        used = _within(m, d * bound)
    p = _fma(step_size, tl.div_rn(used, d), p, HARDWARE) if HARDWARE else p + tl.div_rn(step_size * used, d)
    return m, v, p


@triton.jit
def _raise(largest, stored):
    return tl.maximum(largest, tl.abs(stored), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _keep(kept, largest, scale_inv):
    # Bits of magnitudes are in the order of the magnitudes, and those of NaN above infinity.
    bits = tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(kept, tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True) * scale_inv, sem="relaxed")


@triton.jit
def _numbers(own):
    """All numbers that `_scalars_kernel` left of a tensor, in its order."""
    g_old = tl.load(own + SCALAR.value.g_old)
    clip = tl.load(own + SCALAR.value.clip)
    m_old = tl.load(own + SCALAR.value.m_old)
    m_scale = tl.load(own + SCALAR.value.m_scale)
    m_new = tl.load(own + SCALAR.value.m_new)
    v_old = tl.load(own + SCALAR.value.v_old)
    v_scale = tl.load(own + SCALAR.value.v_scale)
    v_new = tl.load(own + SCALAR.value.v_new)
    p_old = tl.load(own + SCALAR.value.p_old)
    p_scale = tl.load(own + SCALAR.value.p_scale)
    p_new = tl.load(own + SCALAR.value.p_new)
    w_scale = tl.load(own + SCALAR.value.w_scale)
    weight_decay = tl.load(own + SCALAR.value.weight_decay)
    remaining = tl.load(own + SCALAR.value.remaining)
    weight = tl.load(own + SCALAR.value.weight)
    beta2 = tl.load(own + SCALAR.value.beta2)
    w2 = tl.load(own + SCALAR.value.w2)
    correction = tl.load(own + SCALAR.value.correction)
    eps = tl.load(own + SCALAR.value.eps)
    step_size = tl.load(own + SCALAR.value.step_size)
    correction_inverse = tl.load(own + SCALAR.value.correction_inverse)
    bound = tl.load(own + SCALAR.value.bound)
    turn = tl.load(own + SCALAR.value.turn).to(tl.int32)
    return (
        g_old, clip, m_old, m_scale, m_new, v_old, v_scale, v_new, p_old, p_scale, p_new, w_scale, weight_decay, remaining, weight, beta2,
        w2, correction, eps, step_size, correction_inverse, bound, turn,
    )  # fmt: skip


@triton.jit
def _pointers(
    row, first, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Pointers to element `first` of gradient, moments, master and weight; the last is the master's again without a weight beside it."""
    g_pointer = _pointer(tl.load(row + ROW.value.grad), G, ALIGNED) + first
    m_pointer = _pointer(tl.load(row + ROW.value.m), M, ALIGNED) + first
    v_pointer = _pointer(tl.load(row + ROW.value.v), V, ALIGNED) + first
    p_pointer = _pointer(tl.load(row + ROW.value.master), P, ALIGNED) + first
    w_pointer = p_pointer
    if W != 0:
        w_pointer = _pointer(tl.load(row + ROW.value.weight), W, ALIGNED) + first
    return g_pointer, m_pointer, v_pointer, p_pointer, w_pointer


@triton.jit
def _store_weights(
    p_pointer, w_pointer, at, inside, p, p_scale, p_new, w_scale, largest, P: tl.constexpr, W: tl.constexpr, HARDWARE: tl.constexpr,
    threshold,
):  # fmt: skip
    """Store the master, cast the weight from it as stored, and give the `largest` magnitudes of masters so far."""
    stored = _store(p_pointer, at, inside, p, p_scale, P, HARDWARE, threshold)
    largest = _raise(largest, tl.where(inside, stored, 0.0))
    if W != 0:
        _store(w_pointer, at, inside, _scaled(stored, p_new, P), w_scale, W, HARDWARE)
    return largest


@triton.jit(do_not_specialize=["skipped", "pieces"])
def _adamw_kernel(
    table, owners, skipped, scalars, kept, pieces, usable,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, KEEP_P: tl.constexpr,
    DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
    MOMENTS: tl.constexpr, MASTERS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    if tl.load(usable) == 0:
        return
    row, first, left = _span(table, owners, skipped, COLUMNS, CHUNK, ALIGNED)
    own = scalars + tl.load(owners + tl.program_id(0)) * SCALARS
    # All numbers come before the loop: the compiler cannot tell that its stores leave them alone.
    (
        g_old, clip, m_old, m_scale, m_new, v_old, v_scale, v_new, p_old, p_scale, p_new, w_scale, weight_decay, remaining, weight, beta2,
        w2, correction, eps, step_size, correction_inverse, bound, turn,
    ) = _numbers(own)  # fmt: skip
    key = tl.load(row + ROW.value.key)
    index = tl.load(row + ROW.value.offset) + first
    BOUNDED: tl.constexpr = M != 23 or V != 23
    g_pointer, m_pointer, v_pointer, p_pointer, w_pointer = _pointers(row, first, G, M, V, P, W, ALIGNED)
    m_largest = tl.zeros((BLOCK,), tl.float32)
    v_largest = tl.zeros((BLOCK,), tl.float32)
    p_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < left
        g = _read(g_pointer, at, inside, g_old, G, HARDWARE) * clip
        m = _read(m_pointer, at, inside, m_old, M, HARDWARE)
        v = _read(v_pointer, at, inside, v_old, V, HARDWARE)
        p = _read(p_pointer, at, inside, p_old, P, HARDWARE)
        before = m
        decayed = g
        if not DECOUPLED:
            decayed = _fma(weight_decay, p, g, HARDWARE)
        m, v, p = _adam(
            g, m, v, p, weight_decay, remaining, weight, beta2, w2, correction, correction_inverse, eps, step_size, bound,
            DECOUPLED, BOUNDED, HARDWARE,
        )  # fmt: skip
        of_m = None
        of_v = None
        of_p = None
        if MOMENTS or MASTERS:
            h = _hash(key, index, at, WIDE)
            if MOMENTS:
                of_m = _threshold(h, turn)
                of_v = _threshold((h * HASH_SPREAD) >> 16, turn)
            if MASTERS:
                of_p = _threshold(h >> 16, turn)
        m_largest = _raise(m_largest, _store_m(m_pointer, at, inside, m, before, decayed, m_scale, M, HARDWARE, of_m))
        v_largest = _raise(v_largest, _store_v(v_pointer, at, inside, v, v_scale, V, HARDWARE, of_v))
        p_largest = _store_weights(p_pointer, w_pointer, at, inside, p, p_scale, p_new, w_scale, p_largest, P, W, HARDWARE, of_p)
    kept += tl.load(row + ROW.value.place)
    if M != 23 and M != 7:
        _keep(kept, m_largest, m_new)
    if V != 23 and V != 7:
        _keep(kept + pieces, v_largest, v_new)
    if KEEP_P:
        _keep(kept + 2 * pieces, p_largest, p_new)


def _address(x: torch.Tensor) -> int:
    return (x.payload if isinstance(x, ScalingTensor) else x).data_ptr()


def _scale_address(x: torch.Tensor) -> int:
    return x.scale_inv.data_ptr() if isinstance(x, ScalingTensor) else 0


def _mantissa(xs: list[torch.Tensor]) -> int:
    """The format of tensors that have one; 0 for none."""
    return of_dtype((xs[0].payload if isinstance(xs[0], ScalingTensor) else xs[0]).dtype).mantissa_bits if xs else 0


def _table_rows(batch: Batch, columns: Sequence[list[torch.Tensor]], numels: Sequence[int]) -> list[tuple[int, ...]]:
    """A `Row` of each parameter of a batch, from its gradients, moments, masters and weights as `columns`; the weights may be none."""
    none = [0] * len(numels)
    grad, m, v, master, weight = ([_address(x) for x in column] or none for column in columns)
    of_grad, of_m, of_v, of_master, of_weight = ([_scale_address(x) for x in column] or none for column in columns)
    seeds = {"key": batch.keys or none, "offset": batch.offsets or none}
    return rows_of(
        Row, numel=numels, grad=grad, m=m, v=v, master=master, weight=weight,
        index=batch.indices, place=batch.places, step=[step.data_ptr() for step in batch.steps],
        grad_scale_inv=of_grad, m_scale_inv=of_m, v_scale_inv=of_v, master_scale_inv=of_master, weight_scale_inv=of_weight,
        **seeds,
    )  # fmt: skip


def constants_of(batch: Batch, m: int, v: int, master: int, rounding: Rounding) -> dict[str, bool]:
    """What a kernel is compiled for: what is rounded stochastically, and whether indices need more than 32 bits.

    Args:
        m, v, master: mantissa bits of their formats; 23 where nothing of a state is rounded here.
    """
    found = {"MOMENTS": rounding.moments and (m != 23 or v != 23), "MASTERS": rounding.masters and master != 23}
    if not any(found.values()):
        return {**found, "WIDE": False}
    check_keys(batch)
    ends = [offset + g.numel() for offset, g in zip(batch.offsets, batch.grads, strict=True)]
    return {**found, "WIDE": max(ends, default=0) >= 2**32}


def adamw(
    tables: Tables,
    batch: Batch,
    hyper: torch.Tensor,
    amaxes: torch.Tensor,
    kept: torch.Tensor,
    coefficient: torch.Tensor | None,
    usable: torch.Tensor,
    *,
    decoupled: bool,
    rounding: Rounding = NEAREST,
) -> None:
    """See the reference twin; `hyper`: FP64 [8], as `hyper_numbers` makes it."""
    columns = (batch.grads, batch.ms, batch.vs, batch.masters, batch.weights)
    rows = _table_rows(batch, columns, [g.numel() for g in batch.grads])
    formats = dict(zip("GMVPW", map(_mantissa, columns), strict=True))
    drawn = constants_of(batch, formats["M"], formats["V"], formats["P"], rounding)
    key = ("adamw", batch.indices[0], *formats.values())
    table, parts = tables.lay_out(key, rows, 5, CHUNK)
    scalars = torch.empty(len(rows), SCALARS, device=tables.device)
    flag, sizes = usable.view(torch.uint8), {"COLUMNS": COLUMNS, "SCALARS": SCALARS}
    # For its scale a plain FP16 weight is as one in FP32: it has none.
    scales_of = formats if any(isinstance(w, ScalingTensor) for w in batch.weights) else formats | {"W": 23}
    _scalars_kernel[(len(rows),)](
        table, hyper, amaxes, amaxes.shape[1], kept, kept.shape[1], flag if coefficient is None else coefficient, flag, scalars,
        CLIP=coefficient is not None, DECOUPLED=decoupled, num_warps=1, enable_fp_fusion=False, **scales_of, **sizes,
    )  # fmt: skip
    keep_master = isinstance(batch.masters[0], ScalingTensor) or not decoupled or any(isinstance(w, ScalingTensor) for w in batch.weights)
    skipped = 0
    for owners, aligned in parts:
        _adamw_kernel[(owners.numel(),)](
            table, owners, skipped, scalars, kept, kept.shape[1], flag, KEEP_P=keep_master, DECOUPLED=decoupled, ALIGNED=aligned,
            HARDWARE=amaxes.is_cuda, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=8, maxnreg=REGISTERS, enable_fp_fusion=False,
            **formats, **sizes, **drawn,
        )  # fmt: skip
        skipped += owners.numel()
