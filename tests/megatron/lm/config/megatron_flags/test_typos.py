"""Hints at close spellings."""

import pytest

from megatron.lm.config.megatron_flags.typos import closest, distance_of

KNOWN = ("--train-iters", "--lr", "--override-data", "--min-lr", "--tensor-model-parallel-size", "--seed")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--trian-iters", "--train-iters"),
        ("--train-iter", "--train-iters"),
        ("--tarin-iter", "--train-iters"),
        ("--sede", "--seed"),
        ("--mock-data", None),
        ("--max-lr", None),
        ("--tensor-parallel-size", None),
        ("--lr", "--lr"),
    ],
)
def test_only_a_slip_of_the_fingers_is_hinted_at(word, meant):
    assert closest(word, KNOWN) == meant


@pytest.mark.parametrize(
    ("one", "other", "slips"),
    [("ab", "ab", 0), ("ab", "ba", 1), ("abc", "abd", 1), ("abc", "ab", 1), ("abcd", "badc", 2), ("abcd", "wxyz", 3)],
)
def test_slips_are_counted_up_to_the_most(one, other, slips):
    assert distance_of(one, other, 2) == slips
    assert distance_of(other, one, 2) == slips
