import argparse

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.sections import baselines
from msamp.numerics import recipe
from tools.precisions import case_flags, known, legal_case, legal_precision, main, precision_flags


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


@pytest.mark.parametrize("name", baselines.names())
def test_a_peer_is_a_precision_of_the_tools_too(name):
    """bench_step refused them, so that the comparison of one flag could not be measured."""
    assert legal_case(f"{name} --seed 2") == f"{name} --seed 2"
    assert precision_flags(name) == ["--precision", name]


def test_the_way_to_cast_reaches_the_recipe():
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *precision_flags("O2+blockwise")])
    assert config.precision.recipe.gemm == recipe.GEMMS["blockwise"]


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


def test_as_a_program_it_lists_every_precision_and_its_flags(capsys):
    """It printed nothing."""
    assert main([]) == 0
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == known()
    assert {"bf16", "O2", "O3+blockwise", "coat+mxfp8", "te-delayed"} <= set(known())
    assert dict(lines)["O2+blockwise"] == "--precision O2 --fp8-recipe blockwise"
    assert main(["O2 --master-format bf16"]) == 0
    assert capsys.readouterr().out.split() == ["O2", "--master-format", "bf16", "--precision", "O2", "--master-format", "bf16"]
