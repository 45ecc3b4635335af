"""The FP8 GEMMs against the FP64 product of the values that their operands stand for, and the three of a layer against golden vectors."""

import warnings

import pytest
import torch

from helpers.choices import every_pair
from helpers.definitions import dequantize_blocks
from helpers.numerics import BLOCK_NOISE, blockwise, make, stored
from msamp.kernels import scaled_mm as module
from msamp.kernels.reference.block_cast import block_cast
from msamp.kernels.scaled_mm import (
    block_scaled_mm,
    blockwise_hardware,
    emulated_block_mm,
    emulated_mm,
    fp8_hardware,
    scaled_mm,
    scaled_mm_,
    warn_if_emulated,
)
from msamp.numerics.accumulation import accumulating
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Block
from msamp.numerics.tensor import ScalingTensor

PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# Of the largest magnitude of the output: one rounding to it, and for the sum FP32's (hardware keeps a few bits less).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operand(shape: tuple[int, int], fmt, seed: int, device) -> ScalingTensor:
    return ScalingTensor.quantize(make("normal", shape, seed=seed, device=device) * 3.0, fmt)


def product(a: ScalingTensor, b: ScalingTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    return out if bias is None else out + bias.double()


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"off by {error:.2e} of the largest value, at most {tolerance:.2e}"


@every_pair
@pytest.mark.parametrize("shape", [(16, 16, 16), (17, 33, 5), (1, 16, 48), (40, 7, 100), (64, 128, 96), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_the_product_in_fp64(shape, pair, out_dtype, with_bias, device):
    (M, N, K), (fa, fb) = shape, pair
    a, b = operand((M, K), fa, 1, device), operand((N, K), fb, 2, device)
    bias = make("normal", (N,), seed=3, device=device).to(out_dtype) if with_bias else None
    out = scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, bias, out_dtype, fast_accum=False)
    assert (out.shape, out.dtype, out.device) == ((M, N), out_dtype, a.device)
    assert out.is_contiguous()
    looser = 512 if fp8_hardware(a.device) and out_dtype == torch.float32 else 2 if with_bias else 1
    assert_close(out, product(a, b, bias), looser * TOLERANCE[out_dtype])


def test_hoppers_emulated_accumulation_adds_the_bias_before_it_rounds():
    a, b = operand((16, 64), E4M3, 1, "cpu"), operand((16, 64), E4M3, 2, "cpu")
    bias = torch.linspace(-1, 1, 16).bfloat16()
    args = (a.payload, b.payload, a.scale_inv, b.scale_inv)
    with accumulating("hopper"):
        exact = scaled_mm(*args, None, torch.float32, fast_accum=True)
        assert scaled_mm(*args, bias, torch.bfloat16, fast_accum=True).equal((exact + bias).bfloat16())


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32), (16, 32, 0)], ids=str)
def test_no_rows_no_columns_and_an_empty_sum(shape, device):
    M, N, K = shape
    one = torch.ones((), device=device)
    a, b = torch.zeros(M, K, device=device).to(E4M3.dtype), torch.zeros(N, K, device=device).to(E4M3.dtype)
    out = scaled_mm(a, b, one, one, None, torch.bfloat16, fast_accum=False)
    assert out.shape == (M, N)
    assert out.eq(0).all()


@pytest.mark.parametrize("wide", [True, False])
def test_emulation_is_the_same_with_and_without_native_bf16(wide, monkeypatch):
    monkeypatch.setattr(module, "native_bf16", lambda device: wide)
    a, b = operand((32, 64), E4M3, 1, "cpu"), operand((48, 64), E4M3, 2, "cpu")
    for dtype in (torch.bfloat16, torch.float32):
        assert_close(emulated_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, dtype), product(a, b), 2 * TOLERANCE[dtype])


def test_emulation_does_not_overflow_before_the_scales_come():
    a = torch.full((16, 16), 57344.0).to(E5M2.dtype)
    scale = torch.tensor(2.0**-14)
    out = emulated_mm(a, torch.full((16, 16), 448.0).to(E4M3.dtype), scale, scale, torch.float16)
    assert out.isfinite().all()


def test_fake_tensors_leave_later_real_ones_alone():
    module._values.cache_clear()
    with torch._subclasses.FakeTensorMode():
        module._decode(torch.ones(4, 4).to(E4M3.dtype), torch.float32)
    assert module._decode(torch.ones(4, 4).to(E4M3.dtype), torch.float32).equal(torch.ones(4, 4))


def test_a_cpu_has_no_fp8_and_is_not_warned_about():
    assert not fp8_hardware(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_emulated(torch.device("cpu"))


@every_pair
@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8192, 2048, 2048), (1000, 777, 333), (128, 6144, 8192)], ids=str)
def test_hardware_against_the_emulation(fast, pair, out_dtype, shape):
    (M, N, K), (fa, fb) = shape, pair
    a, b = operand((M, K), fa, 1, "cuda"), operand((N, K), fb, 2, "cuda")
    got = scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, None, out_dtype, fast_accum=fast)
    want = emulated_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, out_dtype)
    noise = (got.double() - want.double()).norm() / want.double().norm()
    assert noise < (4e-3 if fast or out_dtype == torch.bfloat16 else 1e-3), f"relative error {noise:.2e}"


# ------------------------------------------------------------------------------------------------------------- operands in blocks

ROWS, SQUARE, MX = Block(1, 128), Block(128, 128), Block(1, 32)
SETTINGS = [("fp32", ROWS, SQUARE), ("fp32", ROWS, ROWS), ("power-of-two", ROWS, SQUARE), ("power-of-two", ROWS, ROWS), ("e8m0", MX, MX)]
every_setting = pytest.mark.parametrize(
    ("rule", "left", "right"), SETTINGS, ids=[f"{rule}-{left}-{right}" for rule, left, right in SETTINGS]
)


def in_blocks(x: torch.Tensor, block: Block, rule: str, fmt=E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scale_inv of `x`, as the cast lays them out."""
    return block_cast(x, None, None, rows=block.rows, columns=block.columns, dtype=fmt.dtype, scale_rule=rule, row=True, col=False)[:2]


def block_product(a, b, left: Block, right: Block, out_dtype=torch.float32, bias=None) -> torch.Tensor:
    return block_scaled_mm(a[0], b[0], a[1], b[1], bias, out_dtype, a_block=(left.rows, left.columns), b_block=(right.rows, right.columns))


@every_pair
@every_setting
@pytest.mark.parametrize("shape", [(16, 16, 128), (17, 33, 5), (40, 300, 260), (3, 1, 1), (130, 128, 512)], ids=str)
@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_blocks_against_the_product_in_fp64(rule, left, right, shape, out_dtype, with_bias, device):
    M, N, K = shape
    x, w = make("channel-outlier", (M, K), seed=1, device=device), make("normal", (N, K), seed=2, device=device) * 0.02
    a, b = in_blocks(x, left, rule), in_blocks(w, right, rule)
    bias = make("normal", (N,), seed=3, device=device).to(out_dtype) if with_bias else None
    out = block_product(a, b, left, right, out_dtype, bias)
    want = dequantize_blocks(*a, left, torch.float64) @ dequantize_blocks(*b, right, torch.float64).t()
    assert (out.shape, out.dtype, out.device.type, out.is_contiguous()) == ((M, N), out_dtype, device.type, True)
    # Hopper keeps some 13 bits of a span of 128 (`emulated_block_mm`): 1.1e-3 in FP16 on an H200, where a rounding alone is 4.9e-4.
    hardware = {torch.float32: 512, torch.float16: 4} if blockwise_hardware(out.device) else {}
    looser = hardware.get(out_dtype, 2 if with_bias else 1)
    assert_close(out, want if bias is None else want + bias.double(), looser * TOLERANCE[out_dtype])


@pytest.mark.parametrize("case", blockwise()["linear"]["products"], ids=lambda case: case["rule"])
def test_the_three_products_of_a_layer_against_golden_vectors(case, device):
    operands = blockwise()["linear"]["operands"]
    x, weight, grad = (
        stored(operands[name]["bfloat16"], torch.bfloat16, operands[name]["shape"]).to(device)
        for name in ("input", "weight", "grad_output")
    )
    rule = case["rule"]
    along, both = (MX, MX) if rule == "e8m0" else (ROWS, SQUARE)

    def layouts(operand: torch.Tensor, block: Block):
        out = block_cast(operand, None, None, rows=block.rows, columns=block.columns, dtype=E4M3.dtype, scale_rule=rule, row=True, col=True)
        return out[:2], out[2:]

    (x8, x8_t), (w8, w8_t), (g8, g8_t) = layouts(x, along), layouts(weight, both), layouts(grad, along)
    tolerance = 512 * 2e-6 if blockwise_hardware(x8[0].device) else 2e-6
    for name, got in {
        "output": block_product(x8, w8, along, both),
        "grad_input": block_product(g8, w8_t, along, both)[::20],
        "grad_weight": block_product(g8_t, x8_t, along, along),
    }.items():
        assert_close(got.cpu(), stored(case[name], torch.float32, got.shape).double(), tolerance)


@every_setting
def test_a_block_that_is_not_finite_shows_in_what_it_enters_and_nowhere_else(rule, left, right, device):
    x, w = make("normal", (48, 256), device=device), make("normal", (256, 256), seed=1, device=device)
    x[5, 200] = float("inf")
    w[200, 3] = float("nan")
    nan = block_product(in_blocks(x, left, rule), in_blocks(w, right, rule), left, right).isnan()
    columns = slice(128, 256) if right.rows == 128 else slice(200, 201)
    assert nan[5].all()
    assert nan[:, columns].all()
    nan[5], nan[:, columns] = False, False
    assert not nan.any()


@every_setting
def test_blocks_of_no_rows_no_columns_and_an_empty_sum(rule, left, right, device):
    for shape in ((0, 16, 32), (16, 0, 32), (16, 32, 0)):
        M, N, K = shape
        a, b = in_blocks(torch.zeros(M, K, device=device), left, rule), in_blocks(torch.zeros(N, K, device=device), right, rule)
        out = block_product(a, b, left, right, torch.bfloat16)
        assert out.shape == (M, N)
        assert out.eq(0).all()


def test_emulated_blocks_do_not_overflow_before_the_scales_come():
    a, b = (in_blocks(torch.full((16, 256), value), ROWS, "fp32") for value in (1e30, 1e-30))
    assert_close(block_product(a, b, ROWS, ROWS, torch.float16), torch.full((16, 16), 256.0).double(), 2 * TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("left", "right", "what"),
    [
        (SQUARE, ROWS, r"block\(128 x 128\) by block\(1 x 128\) is not supported"),
        (ROWS, MX, "1 x n or n x n for the right one"),
        (ROWS, Block(32, 128), "1 x n or n x n"),
        (Block(1, 48), Block(1, 48), "divisor of 128"),
    ],
)
def test_blocks_that_have_no_product_are_refused(left, right, what):
    a, tables = torch.zeros(256, 256).to(E4M3.dtype), [torch.ones(block.scales_shape((256, 256))) for block in (left, right)]
    with pytest.raises(ValueError, match=what):
        block_product((a, tables[0]), (a, tables[1]), left, right)


def test_a_table_of_other_blocks_is_refused():
    a, b = in_blocks(torch.ones(16, 256), ROWS, "fp32"), in_blocks(torch.ones(16, 256), SQUARE, "fp32")
    with pytest.raises(ValueError, match=r"b_scale_inv is \(1, 2\); it must be \(16, 2\) for \(16, 256\) in block\(1 x 128\)"):
        block_product(a, b, ROWS, ROWS)


def calls_of_hopper(monkeypatch, shape, rule, left, right) -> dict:
    """What a Hopper GPU's product is called with; it returns zeros."""
    M, N, K = shape
    called: dict = {}

    def product(a, b, **arguments):
        called.update(arguments, a=a, b=b)
        return torch.zeros(a.shape[0], b.shape[1], dtype=arguments["out_dtype"])

    monkeypatch.setattr(module, "blockwise_hardware", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    a, b = in_blocks(make("normal", (M, K)), left, rule), in_blocks(make("normal", (N, K), seed=1), right, rule)
    out = block_product(a, b, left, right, torch.bfloat16)
    assert out.shape == (M, N)
    if called:
        for x, operand in ((a, called["a"]), (b, called["b"].t())):
            assert operand[: x[0].shape[0], :K].float().equal(x[0].float()), "the payload itself"
            assert operand.float().count_nonzero() == x[0].float().count_nonzero(), "padded with zeros"
    return called | {"tables": (a[1], b[1])}


@pytest.mark.parametrize(
    ("shape", "right"),
    [*(((M, N, K), SQUARE) for M, N, K in ((64, 256, 512), (33, 130, 500), (16, 16, 1024), (40, 200, 768))), ((40, 200, 200), ROWS)],
    ids=str,
)
def test_hopper_gets_blocks_as_cublas_reads_them(shape, right, monkeypatch):
    M, N, K = (-(-size // step) * step for size, step in zip(shape, (16, 16, 128), strict=True))
    called = calls_of_hopper(monkeypatch, shape, "fp32", ROWS, right)
    (a, b), blocks = called["tables"], K // 128
    assert (called["a"].shape, called["b"].shape) == ((M, K), (K, N))
    assert (called["scale_a"].shape, called["scale_a"].stride()) == ((M, blocks), (1, M))
    assert called["scale_a"][: shape[0]].equal(a)
    assert called["scale_a"][shape[0] :].eq(1.0).all()
    if right == SQUARE and blocks % 4 == 0:
        assert (called["scale_b"].shape, called["scale_b"].stride()) == ((blocks, -(-shape[1] // 128)), (1, blocks))
        assert called["scale_b"].t().equal(b)
    else:  # also square blocks whose table cuBLAS cannot read as such
        assert (called["scale_b"].shape, called["scale_b"].stride()) == ((blocks, N), (N, 1))
        assert called["scale_b"].t()[: shape[1]].equal(b if right == ROWS else b.repeat_interleave(128, 0)[: shape[1]])
        assert called["scale_b"].t()[shape[1] :].eq(1.0).all()
    assert called["use_fast_accum"] is False


@every_pair
@pytest.mark.gpu
@every_setting
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8192, 2048, 2048), (1000, 777, 333), (128, 6144, 8192), (4096, 3072, 768)], ids=str)
def test_hardware_against_the_emulation_in_blocks(rule, left, right, formats, out_dtype, shape):
    M, N, K = shape
    a = in_blocks(make("channel-outlier", (M, K), seed=1, device="cuda"), left, rule, formats[0])
    b = in_blocks(make("normal", (N, K), seed=2, device="cuda"), right, rule, formats[1])
    bias = make("normal", (N,), seed=3, device="cuda").to(out_dtype)
    for added in (None, bias):
        got = block_product(a, b, left, right, out_dtype, added).double()
        want = emulated_block_mm(a[0], b[0], a[1], b[1], torch.float32, left, right).double() + (0.0 if added is None else added.double())
        noise = (got - want).norm() / want.norm()
        assert noise < BLOCK_NOISE[out_dtype], f"relative error {noise:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [32, 24], ids=["aligned", "padded"])
def test_rows_written_into_a_larger_product_are_those_of_it(rows: int, dtype: torch.dtype, device: torch.device):
    a, b = (operand((size, 64), E4M3, size, device) for size in (2 * rows, 48))
    bias = make("normal", (48,), seed=3, device=device).to(dtype)
    whole = scaled_mm(a.payload, b.payload, a.scale_inv, b.scale_inv, bias, dtype, fast_accum=False)
    out = torch.full_like(whole, torch.nan)
    for part in (slice(rows, 2 * rows), slice(0, rows)):
        scaled_mm_(out[part], a.payload[part], b.payload, a.scale_inv, b.scale_inv, bias, fast_accum=False)
    torch.testing.assert_close(out, whole, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
