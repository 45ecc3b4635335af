"""What `choices.each_once` leaves to the default run and to the night."""

import itertools

from helpers.choices import each_once


def test_each_value_once_by_default_and_the_product_by_night():
    names, cases = each_once(2.0, a=[1, 2, 3], b="xy").args
    assert names == ("a", "b")
    assert [case.values for case in cases] == list(itertools.product([1, 2, 3], "xy"))
    assert [case.values for case in cases if not case.marks] == [(1, "x"), (2, "y"), (3, "x")]
    assert {mark.args for case in cases for mark in case.marks} == {(2.0,)}
    assert {mark.name for case in cases for mark in case.marks} == {"nightly"}
