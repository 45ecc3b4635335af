"""Memory and volume from shapes, against counts by hand."""

import pytest

from tools.reproduce import grids


def test_the_volume_of_weights_by_hand():
    config = grids.configuration("7b", "O0")
    parameters = 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096 + 50304 * 4096
    assert grids.weight_volume(config, 32) == pytest.approx(parameters * 6 * 31 / 32 / 2**30)
    linear = 32 * 12 * 4096**2
    low = 2 * linear + 4 * 50304 * 4096 + 8 * (32 * 13 * 4096 + 2 * 4096)
    assert grids.weight_volume(grids.configuration("7b", "O3"), 32) == pytest.approx(low * 31 / 32 / 2**30)
