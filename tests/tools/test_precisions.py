import argparse

import pytest

from megatron.lm.config.cli import parse_args
from tools.precisions import case_flags, known, legal_case, legal_precision, precision_flags


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("O0", ["--precision", "bf16"]),
        ("O2", ["--precision", "O2"]),
        ("O3+blockwise", ["--precision", "O3", "--fp8-recipe", "blockwise"]),
        ("coat+mxfp8", ["--precision", "coat", "--fp8-recipe", "mxfp8"]),
        ("te-bf16", ["--precision", "te-bf16"]),
    ],
)
def test_a_precision_as_tools_name_it_is_what_the_trainer_takes(text, flags):
    assert precision_flags(text) == flags
    assert legal_precision(text) == text
    assert text in known() or text == "O0"
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *flags])
    assert config.precision.recipe.name == flags[1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("O4", "precision 'O4' is unknown"),
        ("O2+rows", "'rows' is unknown; .*blockwise"),
        ("bf16+blockwise", "bf16 has no FP8 GEMM"),
        ("te-bf16+blockwise", "te-bf16 has no FP8 GEMM"),
    ],
)
def test_what_is_no_precision_is_refused_by_name(text, word):
    with pytest.raises(ValueError, match=word):
        precision_flags(text)
    with pytest.raises(argparse.ArgumentTypeError, match=word):
        legal_precision(text)


def test_flags_follow_a_precision():
    assert case_flags("O2+blockwise --master-format bf16") == [*precision_flags("O2+blockwise"), "--master-format", "bf16"]
    assert legal_case("O2 --exp-avg-sq-format fp8-e4m3") == "O2 --exp-avg-sq-format fp8-e4m3"
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *case_flags("O2 --master-format bf16")])
    assert config.precision.master_format == "bf16"


@pytest.mark.parametrize(("text", "word"), [("", "is empty: give a precision"), ("--master-format bf16", "'--master-format' is unknown")])
def test_flags_without_a_precision_are_refused(text, word):
    with pytest.raises(argparse.ArgumentTypeError, match=word):
        legal_case(text)
