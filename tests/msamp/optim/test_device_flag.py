"""A flag on its way to the host."""

import pytest
import torch

from msamp.optim.device_flag import DeviceFlag


@pytest.mark.parametrize("value", [True, False])
def test_it_is_what_the_device_had_found_when_it_was_asked(value, device):
    found = torch.tensor(value, device=device)
    flag = DeviceFlag(found)
    found.logical_not_()
    assert bool(flag) is value
    assert bool(flag) is value
