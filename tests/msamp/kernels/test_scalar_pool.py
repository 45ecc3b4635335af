"""Places for scalars that kernels leave: zeroed, aligned, each given once."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from msamp.kernels.scalar_pool import ScalarPool, aligned, captured, take, try_take


def test_every_place_for_a_scale_inv_is_zero_aligned_and_given_once(device):
    places, taken = ScalarPool(2, torch.device(device)), []
    for _ in range(5):
        taken.append(places.take())
        assert (taken[-1].shape, float(taken[-1]), taken[-1].data_ptr() % 16) == ((), 0.0, 0)
        taken[-1].fill_(float(len(taken)))
    assert [float(t) for t in taken] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_place_that_is_kept_for_backward_is_not_changed_by_those_beside_it(device):
    places = ScalarPool(2, torch.device(device))
    kept = places.take()
    version = kept._version
    places.take().fill_(1.0)
    assert kept._version == version


def test_what_evaluation_leaves_over_serves_training(device):
    places = ScalarPool(2, torch.device(device))
    with torch.inference_mode():
        places.take()
    assert not places.take().is_inference()


def test_on_a_cpu_a_cast_makes_its_own():
    assert try_take(torch.device("cpu")) is None
    with captured():
        assert try_take(torch.device("cpu")) is None


def test_several_scalars_lie_together_and_none_is_given_twice(device):
    places = ScalarPool(2, torch.device(device))
    first, second = places.take(4), places.take(3)
    assert (first.shape, second.shape, first.data_ptr() % 16) == ((4,), (3,), 0)
    first.fill_(1.0)
    assert second.tolist() == [0.0] * 3
    assert places.take().tolist() == 0.0
    assert [take(torch.device(device), size).shape for size in (None, 1, 3)] == [(), (1,), (3,)]


def test_the_capture_of_another_thread_waits():
    inside, order = threading.Event(), []

    def other() -> None:
        inside.set()
        with captured():
            order.append("other")

    thread = threading.Thread(target=other)
    with captured():
        thread.start()
        inside.wait()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.gpu
def test_an_eager_cast_on_a_gpu_is_given_a_place_of_its_stream_and_a_foreign_capture_none():
    here = torch.device("cuda", torch.cuda.current_device())
    first, second = try_take(here), try_take(here)
    assert first.data_ptr() != second.data_ptr()
    assert float(first) == float(second) == 0.0
    with torch.cuda.stream(torch.cuda.Stream()):
        other = try_take(here)
    assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device=here)
    with torch.cuda.graph(graph):
        assert try_take(here) is None
        x.add_(1)


@pytest.mark.gpu
def test_under_a_dispatch_mode_nothing_is_left_in_the_pool():
    here = torch.device("cuda", torch.cuda.current_device())
    with FakeTensorMode():
        assert try_take(here) is None
        assert isinstance(take(here), FakeTensor)
    assert not isinstance(try_take(here), FakeTensor)


@pytest.mark.gpu
def test_a_graph_zeroes_its_places_in_every_replay():
    """Also those of a second stream, of more places than one fill gives, and of a second capture behind the first."""
    here, pool, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, sums = [], []
    for _ in range(2):
        graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device=here)
        with captured(), torch.cuda.graph(graph, pool=pool):
            found = [take(here), take(here, 3), *(take(here) for _ in range(300))]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found.append(take(here, 4).add_(1))
            torch.cuda.current_stream().wait_stream(side)
            for one in found:
                total.add_(one.add_(1).sum())
        graphs.append(graph)
        sums.append(total)
    for _ in range(3):
        for graph, total in zip(graphs, sums, strict=True):
            total.zero_()
            graph.replay()
            assert float(total) == 1 + 3 + 300 + 8
    assert float(take(here)) == 0.0


def test_values_stand_where_cublas_takes_them(device):
    values = torch.tensor([1.0, 0.5, float("nan")], device=device)
    found = list(aligned(values))
    assert [x.data_ptr() % 16 for x in found] == [0, 0, 0]
    assert torch.stack(found)[:2].equal(values[:2])
    assert found[2].isnan()
