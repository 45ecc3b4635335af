"""A line of the table."""

import pytest

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, spelled, translated


@pytest.mark.parametrize(
    ("line", "flag", "takes", "value"),
    [
        ("--use-flash-attn", "--use-flash-attn", 0, None),
        ("--seed N", "--seed", 1, None),
        ("--rampup-batch-size N N N", "--rampup-batch-size", 3, None),
        ("--spec TEXT...", "--spec", None, None),
        ("--context-parallel-size 1", "--context-parallel-size", 1, "1"),
        ("--lr-decay-style WSD", "--lr-decay-style", 1, "WSD"),
        ("--moe-*", "--moe-*", None, None),
        ("--override-opt_param-scheduler", "--override-opt-param-scheduler", 0, None),
    ],
)
def test_a_line_is_read_as_a_script_writes_it(line, flag, takes, value):
    (row,) = accepted(line)
    assert (row.flag, row.takes, row.value) == (flag, takes, value)


def test_a_value_is_a_number_or_a_name():
    (row,) = dropped("one is none", "--context-parallel-size 1")
    assert row.serves(["1"])
    assert row.serves(["1.0"])
    assert not row.serves(["2"])
    assert not refused("why", "--optimizer sgd")[0].serves(["adam"])


def test_a_translation_takes_the_values_along():
    (row,) = translated("--norm-epsilon X", "--layernorm-epsilon X")
    assert row.judged(["1e-6"]).becomes == ("--norm-epsilon", "1e-6")
    assert row.verdict.says == "means --norm-epsilon X here"


def test_hyphens_for_underscores():
    assert spelled("--micro_batch-size") == "--micro-batch-size"
