"""The cast in blocks: both layouts against the definition, each cast anew from its input, and what is refused."""

import pytest
import torch

from helpers.choices import every_pair
from helpers.definitions import dequantize_blocks
from helpers.numerics import bits, codes, make
from msamp.kernels.reference.amax import amax
from msamp.kernels.reference.block_cast import block_cast
from msamp.numerics.block_scale import RULES, quantize_blocks
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Block

every_rule = pytest.mark.parametrize("rule", RULES)
every_block = pytest.mark.parametrize("block", [Block(1, 128), Block(128, 128), Block(1, 32), Block(16, 16)], ids=str)


def cast(x, block, rule, fmt=E4M3, *, multiplier=None, slot=None, row=True, col=True):
    return block_cast(x, multiplier, slot, rows=block.rows, columns=block.columns, dtype=fmt.dtype, scale_rule=rule, row=row, col=col)


@every_pair
@every_rule
@every_block
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (130, 129)], ids=str)
def test_both_layouts_are_casts_of_the_input(rule, block, fmt, shape):
    x = make("log-normal", shape).bfloat16()
    y, scale_inv, y_t, scale_inv_t = cast(x, block, rule, fmt)
    for payload, table, operand in ((y, scale_inv, x), (y_t, scale_inv_t, x.t())):
        want, wanted_table = quantize_blocks(operand, block, fmt, rule)
        assert (payload.shape, payload.dtype, payload.is_contiguous()) == (operand.shape, fmt.dtype, True)
        assert codes(payload).equal(codes(want))
        assert table.equal(wanted_table)
        assert (table.t() if block.rows == 1 else table).is_contiguous()


@every_rule
def test_square_blocks_have_one_set_of_codes_and_blocks_of_one_row_two(rule):
    x = make("channel-outlier", (256, 256))
    y, scale_inv, y_t, scale_inv_t = cast(x, Block(128, 128), rule)
    assert codes(y).t().equal(codes(y_t))
    assert scale_inv.t().equal(scale_inv_t)
    y, _, y_t, _ = cast(x, Block(1, 128), rule)
    assert not codes(y).t().equal(codes(y_t))


@pytest.mark.parametrize("rule", ["fp32", "power-of-two"])  # what saturates by E8M0's rule hides the second rounding
def test_the_transpose_is_cast_from_the_input_and_not_from_the_payload(rule):
    x = make("normal", (256, 256)) * (2.0 * torch.linspace(-3, 3, 256)).exp().view(-1, 1)
    block = Block(1, 32)
    y, scale_inv, y_t, scale_inv_t = cast(x, block, rule)
    again = quantize_blocks(dequantize_blocks(y, scale_inv, block).t(), block, E4M3, rule)
    fresh, twice = dequantize_blocks(y_t, scale_inv_t, block), dequantize_blocks(*again, block)
    assert (fresh - x.t()).norm() < (twice - x.t()).norm()


@every_rule
@every_block
def test_what_is_not_asked_for_is_empty(rule, block):
    x = make("normal", (40, 70))
    both = cast(x, block, rule)
    for row, col in ((True, False), (False, True), (False, False)):
        out = cast(x, block, rule, row=row, col=col)
        for asked, got, want in zip((row, row, col, col), out, both, strict=True):
            assert got.dtype == want.dtype
            assert bits(got).equal(bits(want)) if asked else got.numel() == 0


@every_rule
def test_a_multiplier_is_applied_before_the_amax(rule):
    x, multiplier, slot = make("normal", (40, 70)).half(), torch.tensor(2.0**-9), torch.zeros(())
    got = cast(x, Block(32, 32), rule, multiplier=multiplier, slot=slot)
    want = cast(x.float() * multiplier, Block(32, 32), rule)
    assert all(bits(a).equal(bits(b)) for a, b in zip(got, want, strict=True))
    assert slot == amax(x) * multiplier


@pytest.mark.parametrize("old", [0.0, 2.0, 1e30])
def test_the_slot_is_raised_to_the_amax(old):
    x, slot = make("normal", (40, 70)), torch.tensor(old)
    cast(x, Block(1, 32), "fp32", slot=slot, row=False, col=True)
    assert slot == max(old, amax(x))
    x[3, 5] = float("nan")
    cast(x, Block(1, 32), "fp32", slot=slot)
    assert slot == float("inf")


@every_rule
@pytest.mark.parametrize("shape", [(0, 40), (40, 0)], ids=str)
def test_nothing_to_cast(rule, shape):
    slot = torch.tensor(3.0)
    y, scale_inv, y_t, scale_inv_t = cast(torch.empty(shape), Block(1, 32), rule, slot=slot)
    assert (y.shape, y_t.shape, slot) == (shape, shape[::-1], 3.0)
    assert scale_inv.shape == Block(1, 32).scales_shape(shape)
    assert scale_inv_t.shape == Block(1, 32).scales_shape(shape[::-1])


@pytest.mark.parametrize("strided", [lambda x: x.t(), lambda x: x[::2, 1::3]])
def test_strided_inputs(strided):
    x = strided(make("normal", (64, 96)))
    assert all(
        bits(a).equal(bits(b)) for a, b in zip(cast(x, Block(1, 32), "fp32"), cast(x.contiguous(), Block(1, 32), "fp32"), strict=True)
    )


def test_it_takes_no_part_in_autograd():
    x = make("normal", (8, 32)).requires_grad_()
    assert not any(out.requires_grad for out in cast(x, Block(1, 32), "fp32"))


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "rule", "what"),
    [
        ((4,), 1, 32, "fp32", "a cast with blocks requires"),
        ((4, 4), 1, 48, "fp32", "block of 1 x 48 has no kernel"),
        ((4, 4), 1, 256, "fp32", "power of two from 16 to 128"),
        ((4, 4), 1, 8, "fp32", "power of two from 16 to 128"),
        ((4, 4), 2, 32, "fp32", "1 x n or n x n"),
        ((4, 4), 1, 32, "fp16", "scale rule 'fp16' is unknown; choose one of fp32, power-of-two, e8m0"),
    ],
)
def test_what_does_not_fit_is_refused(shape, rows, columns, rule, what):
    with pytest.raises(ValueError, match=what):
        block_cast(torch.zeros(shape), None, None, rows=rows, columns=columns, dtype=E4M3.dtype, scale_rule=rule, row=True, col=True)
