"""The random generators of a rank: put back, they draw on as if nothing had been; and whose state is whose."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from megatron.lm.checkpoint import rng
from megatron.lm.processes.cpu_home import cpu_home


def draws() -> list[float]:
    return [torch.rand(()).item(), random.gauss(0, 1), random.random(), numpy.random.standard_normal(), numpy.random.randint(2**31)]


@pytest.mark.parametrize("halfway", [False, True], ids=["at-rest", "a-second-normal-number-waits"])
def test_restored_generators_draw_what_they_would_have_drawn(halfway: bool):
    if halfway:
        random.gauss(0, 1)
        numpy.random.standard_normal()
    saved = {name: value.clone() for name, value in rng.state().items()}
    expected = draws()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    assert draws() != expected
    rng.restore(saved)
    assert draws() == expected


@pytest.mark.gpu
def test_generators_that_a_graph_can_exchange_are_restored():
    torch.cuda.init()
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    tracker.add("region", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "get_cuda_rng_tracker", lambda: tracker)
        saved = {name: value.clone() for name, value in rng.state().items()}
        assert saved["tensor_parallel.region"].dtype == torch.uint8
        with tracker.fork("region"):
            expected = torch.rand(4, device="cuda")
        rng.restore(saved)
        with tracker.fork("region"):
            assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_the_generators_of_tensor_parallel_regions_are_restored():
    with cpu_home():
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        try:
            tracker.add("region", 5)
            saved = {name: value.clone() for name, value in rng.state().items()}
            assert "tensor_parallel.region" in saved
            with tracker.fork("region"):
                expected = torch.rand(4)
            with tracker.fork("region"):
                assert not torch.equal(torch.rand(4), expected)
            rng.restore(saved)
            with tracker.fork("region"):
                assert torch.equal(torch.rand(4), expected)
        finally:
            tracker.reset()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    {
        "another length": ("torch", lambda x: x[:-1].clone(), "its random states are invalid"),
        "zeros": ("torch", torch.zeros_like, "its random states are invalid"),
        "another dtype": ("torch", lambda x: x.float(), "its random states are invalid"),
        "few keys": ("numpy.keys", lambda x: x[:3].clone(), "its random states are invalid"),
        "a position beyond": ("numpy.rest", lambda x: x + 1000, "numpy's generator has position .*, expected 0 to 624"),
        "a position before": ("numpy.rest", lambda x: x - 1000, "numpy's generator has position -.*, expected 0 to 624"),
        "a position that is NaN": ("numpy.rest", lambda x: x * float("nan"), "numpy's generator has position nan, expected 0 to 624"),
        "negative keys": ("python.keys", lambda x: -x - 1, "its random states are invalid"),
        "python's position": ("python.keys", lambda x: torch.cat([x[:-1], torch.tensor([700])]), "its random states are invalid"),
        "two numbers": ("python.gauss", lambda x: x.expand(2).clone(), "its random states are invalid"),
        "no bytes": ("tensor_parallel.a", lambda x: torch.ones(3), "tensor_parallel.a is not bytes"),
    }.values(),
)
def test_states_that_are_none_are_refused_before_a_generator_changes(name: str, change: Callable[[Tensor], Tensor], said: str):
    saved = {key: x.clone() for key, x in rng.state().items()}
    rng.check(saved)
    with pytest.raises(ValueError, match=said):
        rng.check(saved | {name: change(saved.get(name, torch.ones(1)))})
    with pytest.raises(ValueError, match="its random states are invalid"):
        rng.check({key: x for key, x in saved.items() if key != "numpy.rest"})
    now = rng.state()
    assert all(torch.equal(x, now[key]) or bool(x.isnan().all()) for key, x in saved.items())
