"""Places for scale_inv: zeroed, aligned, each given once."""

import pytest
import torch

from msamp.nn.scale_invs import ScaleInvs, aligned, eager_place


def test_every_place_for_a_scale_inv_is_zero_aligned_and_given_once(device):
    places, taken = ScaleInvs(2, torch.device(device)), []
    for _ in range(5):
        taken.append(places.take())
        assert (taken[-1].shape, float(taken[-1]), taken[-1].data_ptr() % 16) == ((), 0.0, 0)
        taken[-1].fill_(float(len(taken)))
    assert [float(t) for t in taken] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_place_that_is_kept_for_backward_is_not_changed_by_those_beside_it(device):
    places = ScaleInvs(2, torch.device(device))
    kept = places.take()
    version = kept._version
    places.take().fill_(1.0)
    assert kept._version == version


def test_what_evaluation_leaves_over_serves_training(device):
    places = ScaleInvs(2, torch.device(device))
    with torch.inference_mode():
        places.take()
    assert not places.take().is_inference()


def test_on_a_cpu_a_cast_makes_its_own():
    assert eager_place(torch.device("cpu")) is None


@pytest.mark.gpu
def test_an_eager_cast_on_a_gpu_is_given_a_place_of_its_stream_and_a_capture_none():
    here = torch.device("cuda", torch.cuda.current_device())
    first, second = eager_place(here), eager_place(here)
    assert first.data_ptr() != second.data_ptr()
    assert float(first) == float(second) == 0.0
    with torch.cuda.stream(torch.cuda.Stream()):
        other = eager_place(here)
    assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device=here)
    with torch.cuda.graph(graph):
        assert eager_place(here) is None
        x.add_(1)


def test_values_stand_where_cublas_takes_them(device):
    values = torch.tensor([1.0, 0.5, float("nan")], device=device)
    found = list(aligned(values))
    assert [x.data_ptr() % 16 for x in found] == [0, 0, 0]
    assert torch.stack(found)[:2].equal(values[:2])
    assert found[2].isnan()
