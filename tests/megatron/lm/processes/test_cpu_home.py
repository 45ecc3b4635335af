import logging

import megatron.core.tensor_parallel.random as megatron_random
import pytest
import torch
from torch.utils._device import _device_constructors

from megatron.lm.processes import cpu_home

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU home is closed where CUDA exists")

REPLACED = ("current_device", "synchronize", "empty_cache", "get_rng_state", "set_rng_state", "manual_seed", "default_generators")


def outside_state() -> tuple:
    functions = tuple(getattr(torch.cuda, name) for name in REPLACED)
    filters = tuple(logging.getLogger(megatron_random.__name__).filters)
    return (*functions, torch.cuda.random.get_rng_state, megatron_random._lazy_call, filters, torch.zeros(1).type())


def test_cuda_means_cpu_inside():
    x = torch.ones(2)
    with cpu_home.cpu_home():
        assert cpu_home.is_active()
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.tensor([1, 2], pin_memory=True).cuda(non_blocking=True).tolist() == [1, 2]
        assert x.cuda() is x
        assert x.to("cuda").device.type == "cpu"
        assert x.to(device="cuda:0", dtype=torch.bfloat16).dtype is torch.bfloat16
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float64).dtype is torch.float64
        torch.cuda.synchronize()


@pytest.mark.parametrize("leave_by_error", [False, True])
def test_everything_is_restored(leave_by_error: bool):
    before = outside_state()
    try:
        with cpu_home.cpu_home():
            assert outside_state() != before
            if leave_by_error:
                raise KeyError
    except KeyError:
        pass
    assert outside_state() == before
    assert not cpu_home.is_active()


def test_random_number_tracker_works_quietly(caplog: pytest.LogCaptureFixture):
    with cpu_home.cpu_home():
        torch.manual_seed(1)
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("shard", 7)
        expected_outside = torch.rand(3)
        torch.manual_seed(1)
        with tracker.fork("shard"):
            first = torch.rand(3)
        assert torch.equal(torch.rand(3), expected_outside)
        with tracker.fork("shard"):
            second = torch.rand(3)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3, generator=generator) for _ in range(2)]))
    assert not caplog.records


def test_a_device_as_a_context_stays_what_it_is():
    _device_constructors.cache_clear()  # as in a process that has not asked
    with cpu_home.cpu_home():
        with torch.device("meta"):
            assert torch.zeros(3).device.type == "meta"
            assert torch.arange(3).device.type == "meta"
        assert torch.zeros(3).device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(3).device.type == "meta"
