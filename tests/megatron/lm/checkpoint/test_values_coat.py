"""COAT's moments from stored chunks: groups keep their bits, or are stored anew."""

from pathlib import Path

import pytest
from torch import Tensor

from helpers import tiny
from helpers.stored_tensors import draw, one, place, stored
from megatron.lm.checkpoint.content import group_keys
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.values import find
from msamp.numerics.formats import COAT_E4M3, COAT_E5M2, E4M3, FP32, Format
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.range_expand import Expanded, quantize_expanded

VOCABULARY = 5


def coat_chunks(x: Tensor, cuts: list[tuple[slice, slice]], fmt: Format = COAT_E4M3) -> tuple[list[list[Item]], Expanded]:
    """The chunks of a moment, each quantised by itself, and the whole moment quantised as one."""
    found = []
    for rows, columns in cuts:
        part, offset = quantize_expanded(x[rows, columns].clone(), fmt), (rows.start or 0, columns.start or 0)
        numbers = zip(group_keys("exp_avg/w", offset), (part.max, part.k), strict=True)
        found.append([Item("exp_avg/w", part.payload, tuple(x.shape), offset), *(Item.whole(name, n) for name, n in numbers)])
    return found, quantize_expanded(x, fmt)


def same_bits(a: object, b: Expanded) -> bool:
    return isinstance(a, Expanded) and tiny.same(tiny.bits([a.payload, a.max, a.k]), tiny.bits([b.payload, b.max, b.k]))


@pytest.mark.parametrize("fmt", [COAT_E4M3, COAT_E5M2], ids=str)
def test_coat_s_groups_keep_their_bits_over_rows_and_over_columns_at_multiples_of_128(tmp_path: Path, fmt: Format):
    x = draw(6, 300)
    cuts = [(slice(0, 2), slice(0, 256)), (slice(2, 6), slice(0, 256)), (slice(0, 6), slice(256, 300))]
    items, whole = coat_chunks(x, cuts, fmt)
    saved = stored(tmp_path, *items)
    everything = find(saved, "exp_avg", [place((0, 0), (6, 300), (6, 300))], (6, 300), VOCABULARY)
    everything.check(tmp_path)
    assert everything.keeps_bits(fmt)
    assert not everything.keeps_bits(FP32)
    assert not everything.keeps_bits(E4M3)
    assert same_bits(everything.moment(fmt), whole)
    part = find(saved, "exp_avg", [place((1, 128), (4, 172), (6, 300))], (4, 172), VOCABULARY).moment(fmt)
    assert same_bits(part, Expanded(whole.payload[1:5, 128:], whole.max[1:5, 1:], whole.k[1:5, 1:]))


def test_coat_s_groups_that_are_cut_elsewhere_are_stored_anew_with_the_error_of_one_more_rounding(tmp_path: Path):
    x = draw(6, 200)
    items, _ = coat_chunks(x, [(slice(0, 6), slice(0, 100)), (slice(0, 6), slice(100, 200))])
    found = find(stored(tmp_path, *items), "exp_avg", [place((0, 0), (6, 200), (6, 200))], (6, 200), VOCABULARY)
    assert not found.keeps_bits(COAT_E4M3)
    once, again = found.values(), found.moment(COAT_E4M3)
    assert isinstance(again, Expanded)
    assert same_bits(again, quantize_expanded(once, COAT_E4M3))
    assert sqnr_db(x, once) > 36
    assert sqnr_db(x, again.dequantize()) > 33
    assert found.to(FP32).equal(once)
    assert same_bits(one(x).moment(COAT_E4M3), quantize_expanded(x, COAT_E4M3))
