"""AdamW over many tensors: one launch computes their scales, and one reads and writes each element once.

Twin: `msamp.kernels.reference.adamw`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.adamw import Batch
from msamp.kernels.reference.store import NEAREST, Rounding
from msamp.kernels.tables import rows_of
from msamp.kernels.triton.adamw_scalars import COLUMNS, ROW, SCALAR, SCALARS, AdamWRow, _scalars_kernel
from msamp.kernels.triton.pack import _payload, _pointer, _span, _value
from msamp.kernels.triton.store import _draws, _read, _store_m, _store_master, _store_v
from msamp.numerics.formats import of_dtype
from msamp.numerics.stochastic_rounding import LANES
from msamp.numerics.tensor import ScalingTensor

BLOCK, CHUNK = 1024, 16384  # 8 elements per thread at a time, in 16-byte accesses; elements per program
WARPS, REGISTERS = 4, 96  # registers per thread: five blocks of 128 threads fit on a multiprocessor, without spilling
PACK = 4  # elements that share the branch of `_step_assembly`


@triton.jit
def _fma(x, y, z, HARDWARE: tl.constexpr):
    # The interpreter's fma rounds twice.
    return tl.fma(x, y, z) if HARDWARE else (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)


@triton.jit
def _quotient(x, y, y_inverse, HARDWARE: tl.constexpr):
    """x / y correctly rounded, for one y and many x, without underflow: the division's fast path without its branch."""
    q = x * y_inverse
    q = _fma(_fma(-y, q, x, HARDWARE), y_inverse, q, HARDWARE)
    return _fma(_fma(-y, q, x, HARDWARE), y_inverse, q, HARDWARE)


@triton.jit
def _averages(g, m, v, p, weight_decay, weight, w2, DECOUPLED: tl.constexpr, HARDWARE: tl.constexpr):
    """New m and v, and the gradient including Adam's decay, as in the twin's `adam_`. `v` and `p` already contain beta2 and the decay."""
    if not DECOUPLED:
        g = _fma(weight_decay, p, g, HARDWARE)
    m = _fma(weight, g - m, tl.where(weight > 0, m, g), HARDWARE)
    # Here and below, torch's order of multiplication differs between CPU and GPU.
    v = _fma(w2, g * g, v, HARDWARE) if HARDWARE else _fma(w2 * g, g, v, HARDWARE)
    return m, v, g


@triton.jit
def _within(x, top):
    return tl.maximum(tl.minimum(x, top, propagate_nan=tl.PropagateNan.ALL), -top, propagate_nan=tl.PropagateNan.ALL)


def _step_assembly(pack: int) -> str:
    """PTX: $0 to $(pack - 1) become clip(m) / (sqrt(v) / correction + eps), with correct rounding of each of the three operations.

    `sqrt.rn` and `div.rn` branch per element: their fast path of a few FMAs is correct unless an exponent is extreme. Here all elements of
    a thread share one branch and one test: v is in [2^-101, 2^100], and m is 0 or at least 2^-64. The caller sets `unusual` to 0 if eps,
    correction and bound guarantee that d is then in [2^-40, 2^60], and all remainders are normal numbers.
    """
    v, m, correction, inverse, eps, bound, unusual = (range(pack * i, pack * (i + 1)) for i in range(1, 8))
    body = [
        ".reg .pred slow; .reg .u32 most, least, u; .reg .f32 r, s, h, e, d, t, y;",
        f"mov.u32 most, ${unusual[0]}; mov.u32 least, 0xffffffff; neg.f32 y, ${correction[0]};",
    ]
    for i in range(pack):
        body += [
            f"mov.b32 u, ${v[i]}; add.u32 u, u, 0xf3000000; max.u32 most, most, u;",  # bits of v minus the bits of 2^-101
            f"mov.b32 u, ${m[i]}; shl.b32 u, u, 1; add.u32 u, u, 0xffffffff; min.u32 least, least, u;",  # without sign; 0 is largest
        ]
    body += ["setp.gt.u32 slow, most, 0x64800000; setp.lt.or.u32 slow, least, 0x3effffff, slow; @slow bra SLOW;"]
    root = {
        "": "rsqrt.approx.ftz.f32 r, {v}; mul.rn.f32 s, {v}, r; mul.rn.f32 h, r, 0f3f000000; neg.f32 t, s; fma.rn.f32 e, t, s, {v}; "
        "fma.rn.f32 s, e, h, s;",
        "SLOW": "sqrt.rn.f32 s, {v}; min.f32 s, s, 0f7f7fffff;",
    }
    quotient = {
        "": "rcp.approx.ftz.f32 r, d; neg.f32 h, d; fma.rn.f32 e, h, r, 0f3f800000; fma.rn.f32 r, r, e, r; neg.f32 h, r; "
        "mul.rn.f32 s, t, r; neg.f32 t, t; fma.rn.f32 e, d, s, t; fma.rn.f32 s, h, e, s; fma.rn.f32 e, d, s, t; fma.rn.f32 {q}, h, e, s;",
        "SLOW": "div.rn.f32 {q}, t, d;",
    }
    for path in ("", "SLOW"):
        body += [f"{path}:"] if path else []
        for i in range(pack):
            body += [
                root[path].format(v=f"${v[i]}"),
                f"mul.rn.f32 t, s, ${inverse[0]};",
                f"fma.rn.f32 e, y, t, s; fma.rn.f32 t, e, ${inverse[0]}, t;",
                f"fma.rn.f32 e, y, t, s; fma.rn.f32 t, e, ${inverse[0]}, t; add.rn.f32 d, t, ${eps[0]};",
                f"mul.rn.f32 h, d, ${bound[0]}; min.NaN.f32 t, ${m[i]}, h; neg.f32 h, h; max.NaN.f32 t, t, h;",
                quotient[path].format(q=f"${i}"),
            ]
        body += ["bra END;" if not path else "END:"]
    return "{ " + " ".join(body) + " }"


STEP_ASSEMBLY = tl.constexpr(_step_assembly(PACK))
STEP_OPERANDS = tl.constexpr(",".join(["=&f"] * PACK + ["f"] * (6 * PACK) + ["r"] * PACK))
STEP_PACK = tl.constexpr(PACK)


@triton.jit
def _moved(m, v, p, correction, correction_inverse, eps, step_size, bound, unusual, BOUNDED: tl.constexpr, HARDWARE: tl.constexpr):
    """The new p from the new moments: the rest of `adam_`, bit for bit."""
    if BOUNDED and HARDWARE:
        quotient = tl.inline_asm_elementwise(
            STEP_ASSEMBLY, STEP_OPERANDS, [v, m, correction, correction_inverse, eps, bound, unusual], dtype=tl.float32, is_pure=True,
            pack=STEP_PACK,
        )  # fmt: skip
        p = _fma(step_size, quotient, p, HARDWARE)
    else:
        root = tl.minimum(tl.sqrt_rn(v), 3.4028234663852886e38)
        d = _quotient(root, correction, correction_inverse, HARDWARE) + eps
        used = m
        if BOUNDED:
            used = _within(m, d * bound)
        p = _fma(step_size, tl.div_rn(used, d), p, HARDWARE) if HARDWARE else p + tl.div_rn(step_size * used, d)
    return p


@triton.jit
def _raise(largest, stored):
    return tl.maximum(largest, tl.abs(stored), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _keep(kept, largest, scale_inv):
    # The bits of magnitudes have the order of the magnitudes, with NaN above infinity.
    bits = tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(kept, tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True) * scale_inv, sem="relaxed")


@triton.jit
def _numbers(own):
    """All numbers that `_scalars_kernel` computed for a tensor, in its order."""
    g_factor = tl.load(own + SCALAR.value.g_factor)
    m_old = tl.load(own + SCALAR.value.m_old)
    m_scale = tl.load(own + SCALAR.value.m_scale)
    m_new = tl.load(own + SCALAR.value.m_new)
    v_factor = tl.load(own + SCALAR.value.v_factor)
    v_scale = tl.load(own + SCALAR.value.v_scale)
    v_new = tl.load(own + SCALAR.value.v_new)
    v_floor = tl.load(own + SCALAR.value.v_floor)
    p_factor = tl.load(own + SCALAR.value.p_factor)
    p_scale = tl.load(own + SCALAR.value.p_scale)
    p_new = tl.load(own + SCALAR.value.p_new)
    w_factor = tl.load(own + SCALAR.value.w_factor)
    weight_decay = tl.load(own + SCALAR.value.weight_decay)
    weight = tl.load(own + SCALAR.value.weight)
    w2 = tl.load(own + SCALAR.value.w2)
    correction = tl.load(own + SCALAR.value.correction)
    eps = tl.load(own + SCALAR.value.eps)
    step_size = tl.load(own + SCALAR.value.step_size)
    correction_inverse = tl.load(own + SCALAR.value.correction_inverse)
    bound = tl.load(own + SCALAR.value.bound)
    turn = tl.load(own + SCALAR.value.turn).to(tl.uint32, bitcast=True)
    return (
        g_factor, m_old, m_scale, m_new, v_factor, v_scale, v_new, v_floor, p_factor, p_scale, p_new, w_factor, weight_decay, weight, w2,
        correction, eps, step_size, correction_inverse, bound, turn,
    )  # fmt: skip


@triton.jit
def _pointers(
    row, first, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Pointers to element `first` of gradient, moments, master and weight; without a separate weight, the last is the master's again."""
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
    p_pointer, w_pointer, at, inside, p, p_scale, w_factor, largest, P: tl.constexpr, W: tl.constexpr, HARDWARE: tl.constexpr, words,
    SR: tl.constexpr,
):  # fmt: skip
    """Store the master, cast the weight from the stored master, and return the `largest` magnitudes of masters so far."""
    stored = _store_master(p_pointer, at, inside, p, p_scale, P, HARDWARE, words, SR)
    largest = _raise(largest, tl.where(inside, stored, 0.0))
    if W != 0:
        w = stored if (P == 23 or P == 7) and (W == 23 or W == 7) else stored * w_factor
        tl.store(w_pointer + at, _payload(w, W, HARDWARE), mask=inside)
    return largest


@triton.jit(do_not_specialize=["skipped", "pieces"])
def _adamw_kernel(
    table, owners, skipped, scalars, kept, pieces, usable,
    G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, P: tl.constexpr, W: tl.constexpr, KEEP_P: tl.constexpr,
    DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr,
    SR_M: tl.constexpr, SR_V: tl.constexpr, SR_P: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    if tl.load(usable) == 0:
        return
    row, first, left = _span(table, owners, skipped, COLUMNS, CHUNK, ALIGNED)
    own = scalars + tl.load(owners + tl.program_id(0)) * SCALARS
    # Load all numbers before the loop: the compiler does not know that the stores in it cannot change them.
    (
        g_factor, m_old, m_scale, m_new, v_factor, v_scale, v_new, v_floor, p_factor, p_scale, p_new, w_factor, weight_decay, weight, w2,
        correction, eps, step_size, correction_inverse, bound, turn,
    ) = _numbers(own)  # fmt: skip
    key = tl.load(row + ROW.value.key)
    index = tl.load(row + ROW.value.offset) + first
    BOUNDED: tl.constexpr = M != 23 or V != 23
    usual = (eps >= 2.0**-40) & (eps <= 2.0**50) & (correction >= 2.0**-9) & (bound <= 2.0**10)
    unusual = tl.where(usual, 0, -1)
    g_pointer, m_pointer, v_pointer, p_pointer, w_pointer = _pointers(row, first, G, M, V, P, W, ALIGNED)
    m_largest = tl.zeros((BLOCK,), tl.float32)
    v_largest = tl.zeros((BLOCK,), tl.float32)
    p_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < left
        g = _value(tl.load(g_pointer + at, mask=inside, other=0), G, HARDWARE) * g_factor
        before = _read(m_pointer, at, inside, m_old, M, HARDWARE)
        v = _value(tl.load(v_pointer + at, mask=inside, other=0), V, HARDWARE) * v_factor
        p = _value(tl.load(p_pointer + at, mask=inside, other=0), P, HARDWARE) * p_factor
        m, v, g = _averages(g, before, v, p, weight_decay, weight, w2, DECOUPLED, HARDWARE)
        of_m, of_v, of_p = _draws(key, index, at, turn, WIDE, WHOLE)
        m_largest = _raise(m_largest, _store_m(m_pointer, at, inside, m, before, g, m_scale, M, HARDWARE, of_m, SR_M))
        p = _moved(m, v, p, correction, correction_inverse, eps, step_size, bound, unusual, BOUNDED, HARDWARE)
        v_largest = _raise(v_largest, _store_v(v_pointer, at, inside, v, v_scale, v_floor, V, HARDWARE, of_v, SR_V))
        p_largest = _store_weights(p_pointer, w_pointer, at, inside, p, p_scale, w_factor, p_largest, P, W, HARDWARE, of_p, SR_P)
    kept += tl.load(row + ROW.value.place)
    if M != 23 and M != 7:
        _keep(kept, m_largest, m_new)
    if V != 23 and V != 7:
        _keep(kept + pieces, v_largest, v_new)
    if KEEP_P:
        _keep(kept + 2 * pieces, p_largest, p_new)


def _stored(x: torch.Tensor) -> torch.Tensor:
    return x.payload if isinstance(x, ScalingTensor) else x


def _mantissa(xs: list[torch.Tensor]) -> int:
    """Return the mantissa bits of the tensors' format; 0 if there are none."""
    return of_dtype(_stored(xs[0]).dtype).mantissa_bits if xs else 0


def _table_rows(batch: Batch, columns: Sequence[list[torch.Tensor]], numels: Sequence[int]) -> list[tuple[int, ...]]:
    """Return a `AdamWRow` for each parameter of a batch; `columns` are its gradients, moments, masters and weights, which may be empty."""
    none = [0] * len(numels)
    grad, m, v, master, weight = ([_stored(x).data_ptr() for x in column] or none for column in columns)
    scales = [[x.scale_inv.data_ptr() if isinstance(x, ScalingTensor) else 0 for x in column] or none for column in columns]
    of_grad, of_m, of_v, of_master, of_weight = scales
    seeds = {"key": batch.keys or none, "offset": batch.offsets or none}
    return rows_of(
        AdamWRow, numel=numels, grad=grad, m=m, v=v, master=master, weight=weight,
        index=batch.indices, place=batch.places, step=[step.data_ptr() for step in batch.steps],
        grad_scale_inv=of_grad, m_scale_inv=of_m, v_scale_inv=of_v, master_scale_inv=of_master, weight_scale_inv=of_weight,
        **seeds,
    )  # fmt: skip


def constants_of(batch: Batch, m: int, v: int, master: int, rounding: Rounding) -> dict[str, bool]:
    """Return the compile-time constants of stochastic rounding: which states use it, and the properties of their indices.

    Args:
        m, v, master: mantissa bits of their formats; 23 for a state that is not rounded here.
    """
    constants = {"SR_M": rounding.m and m != 23, "SR_V": rounding.v and v != 23, "SR_P": rounding.masters and master != 23}
    if not any(constants.values()):
        return {**constants, "WIDE": False, "WHOLE": True}
    ends = [offset + g.numel() for offset, g in zip(batch.offsets, batch.grads, strict=True)]
    wide, whole = max(ends, default=0) >= LANES * 2**32, not any(offset % LANES for offset in batch.offsets)
    return {**constants, "WIDE": wide, "WHOLE": whole}


def launch(
    kernel, tables, key, rows, chunk, batch, inputs, formats, unscaled, *, columns, decoupled, **constants,
):  # fmt: skip
    """Compute the tensors' numbers in one launch, and run a kernel over them.

    Args:
        kernel: `_adamw_kernel`, or another one with its first arguments.
        key, rows, chunk: as for `Tables.lay_out`; `columns` is the width of its table.
        formats: mantissa bits by the letters of the kernel.
        inputs: `hyper`, `amaxes`, `kept`, `coefficient` and `usable` of `adamw`.
        unscaled: letters of the states without a scale per tensor, which are treated like FP32, as a weight without a scale is.
        constants: of the kernel.
    """
    hyper, amaxes, kept, coefficient, usable = inputs
    table, parts = tables.lay_out(key, rows, 5, chunk)
    scalars = torch.empty(len(rows), SCALARS, device=tables.device, dtype=torch.float32)
    flag, sizes = usable.view(torch.uint8), {"COLUMNS": columns, "SCALARS": SCALARS}
    scaled_weight = any(isinstance(w, ScalingTensor) for w in batch.weights)
    scales_of = formats | dict.fromkeys(unscaled if scaled_weight else (*unscaled, "W"), 23)
    _scalars_kernel[(len(rows),)](
        table, hyper, amaxes, amaxes.shape[1], kept, kept.shape[1], flag if coefficient is None else coefficient, flag, scalars,
        CLIP=coefficient is not None, DECOUPLED=decoupled, num_warps=1, enable_fp_fusion=False, **scales_of, **sizes,
    )  # fmt: skip
    keep_master = isinstance(batch.masters[0], ScalingTensor) or not decoupled or scaled_weight
    skipped = 0
    for owners, aligned in parts:
        kernel[(owners.numel(),)](
            table, owners, skipped, scalars, kept, kept.shape[1], flag, KEEP_P=keep_master, DECOUPLED=decoupled, ALIGNED=aligned,
            HARDWARE=amaxes.is_cuda, enable_fp_fusion=False, **formats, **sizes, **constants,
        )  # fmt: skip
        skipped += owners.numel()


def adamw(tables, batch, hyper, amaxes, kept, coefficient, usable, *, decoupled, rounding=NEAREST):
    """See the reference twin; `hyper` is FP64 [8], from `hyper_numbers`."""
    columns = (batch.grads, batch.ms, batch.vs, batch.masters, batch.weights)
    rows = _table_rows(batch, columns, [g.numel() for g in batch.grads])
    formats = dict(zip("GMVPW", map(_mantissa, columns), strict=True))
    launch(
        _adamw_kernel, tables, ("adamw", batch.indices[0], *formats.values()), rows, CHUNK, batch,
        (hyper, amaxes, kept, coefficient, usable), formats, "", columns=COLUMNS, decoupled=decoupled, BLOCK=BLOCK, CHUNK=CHUNK,
        num_warps=WARPS, maxnreg=REGISTERS, **constants_of(batch, formats["M"], formats["V"], formats["P"], rounding),
    )  # fmt: skip
