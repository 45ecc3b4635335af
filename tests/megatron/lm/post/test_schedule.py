"""Rates and rows by the number of the step alone."""

import pytest
import torch

from megatron.lm.post.schedule import drawn, generator, learning_rate


def test_the_rate_rises_and_falls_as_a_cosine():
    rates = [learning_rate(step, steps=12, warmup=2, peak=1.0, low=0.1) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == [*rates[:2], *sorted(rates[2:], reverse=True)]
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(0, steps=1, warmup=0, peak=3.0) == 3.0


def test_every_row_comes_once_an_epoch_and_another_epoch_has_another_order():
    taken = [row for step in range(14) for row in drawn(step, 3, 7, seed=5)]
    epochs = [taken[at : at + 7] for at in range(0, 42, 7)]
    assert all(sorted(each) == list(range(7)) for each in epochs)
    assert len({tuple(each) for each in epochs}) > 1
    assert drawn(3, 3, 7, seed=5) == taken[9:12]
    assert drawn(0, 7, 7, seed=6) != epochs[0]


def test_a_step_may_take_more_than_there_is():
    assert sorted(drawn(0, 6, 2, seed=1)) == [0, 0, 0, 1, 1, 1]


def test_a_generator_is_of_seed_and_number():
    a, b, c = (torch.rand(4, generator=generator(*of)) for of in ((1, 2), (1, 2), (1, 3)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
