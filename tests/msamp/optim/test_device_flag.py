"""A flag on its way to the host."""

import pytest
import torch

from msamp.optim.device_flag import DeviceCopy, DeviceFlag


@pytest.mark.parametrize("value", [True, False])
def test_it_is_what_the_device_had_found_when_it_was_asked(value, device):
    found = torch.tensor(value, device=device)
    flag = DeviceFlag(found)
    found.logical_not_()
    assert bool(flag) is value
    assert bool(flag) is value


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_copy_keeps_what_it_was_made_of(dtype, device):
    found = torch.tensor([1, 0, 1], device=device).to(dtype)
    copy = DeviceCopy(found)
    found.zero_()
    assert copy.values().tolist() == [1, 0, 1]
    assert (copy.values().dtype, copy.values().device.type) == (dtype, "cpu")
