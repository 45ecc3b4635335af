"""Casts in blocks: bit for bit against the golden vectors (plain NumPy), against the formulas, and how much they lose."""

import pytest
import torch

from helpers.choices import each_value
from helpers.definitions import dequantize_blocks
from helpers.numerics import KINDS, LARGE, SMALL, blockwise, check, codes, make, measure, random_floats, stored
from msamp.numerics.block_scale import RULES, block_scale, quantize_blocks, values
from msamp.numerics.formats import E4M3, E5M2, by_name
from msamp.numerics.granularity import TENSORWISE, Block
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax

INF, NAN = float("inf"), float("nan")
every_fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
every_rule = pytest.mark.parametrize("rule", RULES)
VECTORS = blockwise()


def named(case: dict) -> str:
    return f"{case['rule']}-{case['rows']}x{case['columns']}-{case['format']}-{case['x']}"


@pytest.mark.parametrize("case", VECTORS["casts"], ids=named)
def test_golden_casts(case):
    x = stored(VECTORS["inputs"][case["x"]], getattr(torch, case["dtype"]), case["shape"])
    fmt, block = by_name(case["format"]), Block(case["rows"], case["columns"])
    payload, scale_inv = quantize_blocks(x, block, fmt, case["rule"])
    want = stored(case["scale_inv"], torch.uint8 if case["rule"] == "e8m0" else torch.float32, scale_inv.shape)
    assert scale_inv.dtype == want.dtype
    assert scale_inv.nan_to_num(-1.0).equal(want.nan_to_num(-1.0))
    nan = x.isnan()
    assert payload.float().isnan().equal(nan)
    assert codes(payload)[~nan].equal(stored(case["codes"], torch.uint8, x.shape).int()[~nan])


@every_fp8
def test_fp32_scales_put_the_largest_element_on_the_largest_value(fmt):
    amax = random_floats(100_000).abs()
    amax = amax[amax.isfinite() & (amax >= fmt.max * 2.0**-126)]
    scale_inv = RULES["fp32"].scale_inv(amax, fmt.max)
    assert scale_inv.equal((amax.double() / fmt.max).float()), "FP64 holds enough digits of the quotient to be rounded twice"
    assert block_scale(scale_inv).equal((1.0 / scale_inv.double()).float())
    assert quantize(amax, block_scale(scale_inv), fmt).float().eq(fmt.max).all()
    assert block_scale(scale_inv).log2().abs().max() <= 126.1, "neither scale nor scale_inv is subnormal"


@every_fp8
def test_powers_of_two_are_the_tensorwise_rule_and_never_saturate_by_rounding(fmt):
    amax = random_floats(10_000).abs()
    amax = amax[amax.isfinite()]
    assert block_scale(RULES["power-of-two"].scale_inv(amax, fmt.max)).equal(scale_from_amax(amax, fmt.max))


@every_fp8
def test_e8m0_is_the_exponent_of_the_amax_less_that_of_the_format(fmt):
    amax = random_floats(100_000).abs()
    amax = amax[amax.isfinite()]
    code = RULES["e8m0"].scale_inv(amax, fmt.max)
    emax = 8 if fmt == E4M3 else 15
    want = (torch.frexp(amax.double()).exponent - 1 - emax).clamp(min=-127)
    assert code.dtype == torch.uint8
    assert (code.int() - 127).equal(want.masked_fill(amax == 0, -127))
    assert values(code).double().equal(2.0 ** (code.double() - 127))
    largest = (amax.double() * block_scale(code).double())[code > 0]
    assert largest.min() >= 2.0**emax
    assert largest.max() < 2.0 ** (emax + 1), "some of these saturate"


def transformer_engine_code(amax: torch.Tensor, fp_max: float) -> torch.Tensor:
    """The E8M0 code of a finite amax by Transformer Engine's `float_to_e8m0` of amax * (1 / fp_max), in integers as written there."""
    bits = (amax * torch.tensor(1.0 / fp_max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return exponent + up.int()


@every_fp8
def test_e8m0_rounded_up_is_transformer_engines_rule_and_loses_no_maximum(fmt):
    edges = torch.tensor([1.0, fmt.max / 2.0**8, 1.5]) * 2.0 ** torch.arange(-100, 100).reshape(-1, 1)
    near = torch.cat([(edges.flatten().view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    amax = torch.cat([near, random_floats(100_000).abs()])
    amax = amax[amax.isfinite()]
    code = RULES["e8m0-up"].scale_inv(amax, fmt.max)
    assert code.dtype == torch.uint8
    assert code.int().equal(transformer_engine_code(amax, fmt.max))
    scale_inv = values(code).double()
    assert (amax.double() <= fmt.max * scale_inv).all()
    assert (amax.double() > fmt.max * scale_inv / 2)[code > 0].all(), "no smaller scale_inv holds it"


def test_e8m0_saturates_above_the_format_and_the_others_do_not():
    x = torch.full((1, 32), 1.0)
    x[0, 3], x[0, 4] = 1.99, -1.76
    for rule, want in (("e8m0", 448.0 / 256), ("e8m0-up", 2.0), ("power-of-two", 2.0), ("fp32", 1.99)):
        payload, scale_inv = quantize_blocks(x, Block(1, 32), E4M3, rule)
        back = dequantize_blocks(payload, scale_inv, Block(1, 32))
        assert back[0, 3] == pytest.approx(want, rel=1e-6)
        assert back[0, 0] == pytest.approx(1.0, rel=2**-4)
        assert (payload.float().abs() == 448).sum() == {"e8m0": 2, "e8m0-up": 0, "power-of-two": 0, "fp32": 1}[rule]


@each_value(rule=RULES, fmt=[E4M3, E5M2], bad=[NAN, INF, -INF])
def test_a_block_that_is_not_finite_reads_back_as_nan_and_its_neighbours_do_not(rule, fmt, bad):
    x = make("normal", (4, 8))
    x[1, 6] = bad
    payload, scale_inv = quantize_blocks(x, Block(2, 4), fmt, rule)
    back = dequantize_blocks(payload, scale_inv, Block(2, 4))
    assert back.isnan().nonzero().tolist() == [[i, k] for i in range(2) for k in range(4, 8)]
    assert values(scale_inv).isnan().tolist() == [[False, True], [False, False]]
    finite = x[:2, 4:].isfinite()
    assert payload[:2, 4:].float()[finite].equal(quantize(x[:2, 4:], 1.0, fmt).float()[finite])


@pytest.mark.parametrize(("rule", "block"), [("fp32", Block(1, 128)), ("power-of-two", Block(1, 128)), ("e8m0", Block(1, 32))], ids=str)
@each_value(fmt=[E4M3, E5M2], shape=[SMALL, LARGE], kind=KINDS)
def test_keeps_the_limits_of_blocks(rule, block, fmt, shape, kind):
    x = make(kind, shape)
    payload, scale_inv = quantize_blocks(x, block, fmt, rule)
    check(f"{block} {rule}", str(fmt), kind, shape, measure(x, dequantize_blocks(payload, scale_inv, block), payload, fmt))


def tensorwise(x: torch.Tensor) -> torch.Tensor:
    """`x` cast with one just-in-time scale, and back."""
    scale = scale_from_amax(TENSORWISE.amax(x), E4M3.max)
    return dequantize(quantize(x, scale, E4M3), inverse(scale))


@every_rule
@pytest.mark.parametrize("columns", [32, 128])
def test_blocks_keep_what_one_scale_loses_beside_outlying_channels(rule, columns):
    # Along tokens, as grad_weight wants it, every channel has blocks of its own; along channels, outliers are in every block of 128.
    x, block = make("channel-outlier", LARGE), Block(1, columns)
    for operand, gain in ((x.t().contiguous(), 20), (x, 2)):
        one, blocks = (
            measure(operand, tensorwise(operand)),
            measure(operand, dequantize_blocks(*quantize_blocks(operand, block, E4M3, rule), block)),
        )
        assert blocks.underflow * gain <= one.underflow
        if rule != "e8m0":  # which loses 0.5 to 4 dB where outliers saturate, whatever the blocks
            assert blocks.sqnr_db >= one.sqnr_db


@every_rule
@every_fp8
def test_the_next_scale_of_a_rule_is_the_inverse_of_what_it_keeps(rule, fmt):
    """But at the ends of E8M0, where a scale stays within 2^+-126 and one of zeros is 1."""
    amax = random_floats(10_000).abs()
    amax = amax[(amax == 0) | (amax >= 2.0**-100)]
    kept = RULES[rule].scale_inv(amax, fmt.max)
    assert kept.dtype == RULES[rule].kept_dtype
    differ = RULES[rule].next_scale(amax.unsqueeze(-1), fmt.max) != block_scale(kept)
    assert amax[differ].count_nonzero() == 0
    assert not differ.any() or rule.startswith("e8m0")
