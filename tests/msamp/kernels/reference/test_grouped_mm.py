"""The definitions of grouped GEMMs, against one FP64 product per expert."""

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import KINDS, make
from msamp.kernels import ops
from msamp.kernels.reference.grouped_mm import grouped_mm, grouped_mm_grad_weight, grouped_tiles, tile_capacity
from msamp.numerics.formats import E4M3, E5M2, of_dtype
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax

ROWS, N, K = 150, 48, 160
LOADS = {
    "equal": [50, 100, 150],
    "unequal": [1, 130, 150],
    "one expert takes all": [0, 150, 150],
    "no rows for the first and the last": [0, 70, 70, 150, 150],
    "rows of no expert": [20, 20, 90],
    "no rows at all": [0, 0],
}
every_load = pytest.mark.parametrize("ends", LOADS.values(), ids=LOADS)


def cast(x: torch.Tensor, fmt) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scale_inv of a just-in-time cast."""
    scale = scale_from_amax(x.abs().amax(), fmt.max)
    return quantize(x, scale, fmt), inverse(scale)


def operands(kind: str, ends: list[int], a_fmt=E4M3, b_fmt=E4M3):
    """x [ROWS, K] and a weight per expert, in FP8 and as the FP32 values they came from."""
    x, weights = make(kind, (ROWS, K)), make("normal", (len(ends), N, K), seed=1) * torch.arange(1, len(ends) + 1).view(-1, 1, 1)
    a, a_scale_inv = cast(x, a_fmt)
    cast_weights = [cast(w, b_fmt) for w in weights]
    b, b_scale_inv = (
        torch.stack([w.view(torch.uint8) for w, _ in cast_weights]).view(b_fmt.dtype),
        torch.stack([s for _, s in cast_weights]),
    )
    return x, weights, (a, b, torch.tensor(ends, dtype=torch.int32), a_scale_inv, b_scale_inv)


def by_expert(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends], ends, strict=False))


@each_once(fast=[True, False], dtype=[torch.float32, torch.bfloat16])
@every_load
def test_each_expert_multiplies_its_rows(ends, fast, dtype):
    _, _, args = operands("normal", ends)
    a, b, _, a_scale_inv, b_scale_inv = args
    got = ops.grouped_mm(*args, dtype, fast_accum=fast)
    assert (got.shape, got.dtype) == ((ROWS, N), dtype)
    for e, (start, end) in enumerate(by_expert(ends)):
        want = a[start:end].double() @ b[e].double().t() * a_scale_inv.double() * b_scale_inv[e].double()
        torch.testing.assert_close(got[start:end].double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-4)
    assert not got[ends[-1] :].any()


@each_once(fast=[True, False], dtype=[torch.float32, torch.bfloat16])
@every_load
def test_each_expert_s_weight_gradient_sums_its_rows(ends, fast, dtype):
    g, x = (cast(make("normal", (ROWS, width), seed=width), fmt) for width, fmt in ((N, E5M2), (K, E4M3)))
    got = ops.grouped_mm_grad_weight(
        g[0].t().contiguous(), x[0].t().contiguous(), torch.tensor(ends, dtype=torch.int32), g[1], x[1], dtype, fast_accum=fast
    )
    assert (got.shape, got.dtype) == ((len(ends), N, K), dtype)
    for e, (start, end) in enumerate(by_expert(ends)):
        want = (g[0][start:end].double().t() @ x[0][start:end].double()) * g[1].double() * x[1].double()
        torch.testing.assert_close(got[e].double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-4)


# Least SQNR in dB of output, grad_input and grad_weight against the FP32 product, and largest share that became zero; by kind of input.
LIMITS = {"normal": (28.0, 24.0, 24.2), "channel-outlier": (28.0, 23.9, 22.5), "log-normal": (28.7, 24.7, 26.0)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_fp8_costs(kind):
    ends = LOADS["no rows for the first and the last"]
    x, weights, args = operands(kind, ends)
    g = make(kind, (ROWS, N), seed=5)
    g8, g_scale_inv = cast(g, E5M2)
    a, b, offsets, a_scale_inv, b_scale_inv = args
    wide = torch.zeros(ROWS, N), torch.zeros(ROWS, K), torch.zeros(len(ends), N, K)
    for e, (start, end) in enumerate(by_expert(ends)):
        wide[0][start:end], wide[1][start:end] = x[start:end] @ weights[e].t(), g[start:end] @ weights[e]
        wide[2][e] = g[start:end].t() @ x[start:end]
    got = (
        grouped_mm(*args, torch.float32, fast_accum=True),
        grouped_mm(g8, b.transpose(1, 2).contiguous(), offsets, g_scale_inv, b_scale_inv, torch.float32, fast_accum=False),
        grouped_mm_grad_weight(g8.t().contiguous(), a.t().contiguous(), offsets, g_scale_inv, a_scale_inv, torch.float32, fast_accum=False),
    )
    measured = [sqnr_db(w, y) for w, y in zip(wide, got, strict=True)]
    assert all(m >= limit for m, limit in zip(measured, LIMITS[kind], strict=True)), measured
    assert max(underflow_frac(w, y) for w, y in zip(wide, got, strict=True)) <= 2e-4
    assert saturation_frac(a, of_dtype(a.dtype)) <= 2e-4


def test_an_expert_s_scale_is_its_own():
    _, _, args = operands("normal", [50, 100, 150])
    a, b, offsets, a_scale_inv, b_scale_inv = args
    once = grouped_mm(*args, torch.float32, fast_accum=True)
    twice = grouped_mm(a, b, offsets, a_scale_inv, b_scale_inv * torch.tensor([1.0, 2.0, 1.0]), torch.float32, fast_accum=True)
    assert twice[50:100].equal(2 * once[50:100])
    assert twice[:50].equal(once[:50])
    assert twice[100:].equal(once[100:])


@every_load
def test_tiles_cover_every_row_once(ends):
    table = grouped_tiles(torch.tensor(ends, dtype=torch.int32), ROWS, 32)
    count = int(table[3, 0])
    assert table.shape == (4, tile_capacity(ROWS, len(ends), 32))
    owner = torch.full((ROWS,), -1)
    for expert, first, end in table[:3, :count].t().tolist():
        rows = slice(first, min(first + 32, end))
        assert (owner[rows] == -1).all()
        owner[rows] = expert
    want = torch.bucketize(torch.arange(ROWS), torch.tensor(ends), right=True)
    assert owner.equal(want.where(want < len(ends), -1))
    assert not table[:3, count:].any()


def test_the_schedule_has_room_for_any_load():
    for ends in ([1] * 7 + [8], list(range(1, 9)), [0] * 8, [5] * 8):
        table = grouped_tiles(torch.tensor(ends, dtype=torch.int32), 40, 16)
        assert int(table[3, 0]) <= table.shape[1]


OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
A, B, ONE, ONES = torch.zeros(4, 16).to(E4M3.dtype), torch.zeros(2, 8, 16).to(E4M3.dtype), torch.ones(()), torch.ones(2)
