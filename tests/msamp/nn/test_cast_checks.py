"""Casts that a linear layer refuses, by name and with a fix."""

import pytest

from msamp.nn.cast_checks import check_gemm, check_smooth, wire_cast
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.recipe import GEMMS


def test_built_in_casts_are_accepted():
    for gemm in GEMMS.values():
        check_gemm(gemm)
    gemm = recipe.O3.gemm
    assert wire_cast(E4M3, (gemm.input, gemm.grad_output)) == gemm.input


def test_partial_sums_need_the_format_of_an_operand():
    gemm = recipe.O3.gemm
    with pytest.raises(ValueError, match="partial sums cannot be sent in fp16"):
        wire_cast(FP16, (gemm.input, gemm.grad_output))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_smooth_swiglu_needs_one_delayed_scale_per_tensor(name):
    check_smooth(GEMMS["delayed"])
    with pytest.raises(ValueError, match="Smooth-SwiGLU requires operands with one delayed scale per tensor"):
        check_smooth(GEMMS[name])
