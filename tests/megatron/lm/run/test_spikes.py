"""A spike by its definition."""

import pytest

from megatron.lm.run.spikes import LossSpikes


def test_a_spike_is_a_loss_above_the_mean_of_a_whole_window():
    spikes = LossSpikes(2.0, 3)
    found = [spikes.mean_before(loss) for loss in (9.0, 1.0, 1.0, 7.4, 2.0, 7.0)]
    assert found == [None, None, None, pytest.approx(11 / 3), None, pytest.approx(10.4 / 3)]
    spikes.forget()
    assert [spikes.mean_before(loss) for loss in (7.0, 17.0)] == [None, pytest.approx(16.4 / 3)]
    assert [LossSpikes(0.0, 1).mean_before(loss) for loss in (1.0, 1e9)] == [None, None]
