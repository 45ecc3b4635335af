from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from msamp.kernels.cuda_graph import capturing, unregistrable


def capture(graph: object, error: Exception, run: Callable[[], object], **options: object) -> None:
    with capturing(graph, **options):
        run()
        raise error


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}


@pytest.mark.parametrize(
    ("environment", "ranks", "backend", "captured"),
    [
        (EXPANDABLE, 2, "nccl", False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 2, "cpu:gloo,cuda:nccl", False),
        (EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}, 2, "nccl", True),
        (EXPANDABLE, 1, "nccl", True),
        (EXPANDABLE, 2, "gloo", True),
        ({}, 2, "nccl", True),
    ],
)
def test_collectives_are_not_captured_with_expandable_segments(environment, ranks, backend, captured, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", str, raising=False)  # torch reads variables once per process
    assert unregistrable() is None  # without process groups
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")  # as after init_process_group() without a name
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    reason = None if captured else f"NCCL cannot register buffers with {next(iter(environment))}=expandable_segments:True"
    assert (unregistrable() or "").partition(" (set NCCL_GRAPH_REGISTER=0 too)")[0] == (reason or "")


def test_an_error_in_a_capture_is_not_hidden_by_that_of_its_end(monkeypatch):
    """48 layers of experts lacked memory while a collective was under way, and the run said "unjoined work"."""
    graph, streams, unjoined = mock.Mock(), [], mock.MagicMock()
    unjoined.__exit__.side_effect = RuntimeError("capturing stream has unjoined work")
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: unjoined)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(torch.OutOfMemoryError):
        capture(graph, torch.OutOfMemoryError(), int)
    with pytest.raises(RuntimeError, match="unjoined"), capturing(graph):
        pass
    assert (graph.reset.call_count, streams) == (2, ["the caller's"] * 2)


@pytest.mark.gpu
def test_after_a_failed_capture_the_gpu_works_and_the_next_capture_too():
    x, failed, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError):
        capture(failed, ZeroDivisionError(), lambda: x.add_(1))
    with capturing(graph):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 4
