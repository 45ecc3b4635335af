import argparse

import pytest

from megatron.lm.config.cli import parse_args
from msamp.numerics import recipe
from tools.precisions import legal_precision, precision_flags


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("O0", ["--precision", "bf16"]),
        ("O2", ["--precision", "O2"]),
        ("O3+blockwise", ["--precision", "O3", "--fp8-recipe", "blockwise"]),
        ("coat+mxfp8", ["--precision", "coat", "--fp8-recipe", "mxfp8"]),
    ],
)
def test_a_precision_as_tools_name_it_is_what_the_trainer_takes(text, flags):
    assert precision_flags(text) == flags
    assert legal_precision(text) == text
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *flags])
    assert config.precision.recipe.name == flags[1]


def test_the_way_to_cast_reaches_the_recipe():
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *precision_flags("O2+blockwise")])
    assert config.precision.recipe.gemm == recipe.GEMMS["blockwise"]


@pytest.mark.parametrize(
    ("text", "word"),
    [("O4", "precision 'O4' is unknown"), ("O2+rows", "'rows' is unknown; .*blockwise"), ("bf16+blockwise", "bf16 has no FP8 GEMM")],
)
def test_what_is_no_precision_is_refused_by_name(text, word):
    with pytest.raises(ValueError, match=word):
        precision_flags(text)
    with pytest.raises(argparse.ArgumentTypeError, match=word):
        legal_precision(text)
