"""Profiles of iterations by torch.profiler and for nsys, and snapshots of GPU memory."""

import gzip
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import tiny
from megatron.lm.run.reports.profiles import Profiles
from megatron.lm.run.trainer import Trainer
from megatron.lm.shell.logs import Unwritten

TRACE = {"profile": True, "use_pytorch_profiler": True, "num_layers": 1}


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """Chrome traces by file name."""
    return {file.name: json.loads(gzip.decompress(file.read_bytes())) for file in sorted(folder.glob("*.json.gz"))}


def steps_of(trace: dict[str, Any]) -> list[int]:
    """Profiled steps, counted from the start of the profiler."""
    return sorted(int(event["name"].split("#")[1]) for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#"))


def settings(prefix: Path, folder: Path, start: int, end: int, **more: Any) -> Any:
    more = {"train_iters": 6} | TRACE | more
    return tiny.config(prefix, tensorboard_dir=str(folder), profile_step_start=start, profile_step_end=end, **more)


def written(said: str) -> list[str]:
    """File names that the log names."""
    return [Path(path).name for path in re.findall(r"^profile of iterations \d+ to \d+, rank \d+: (.*)$", said, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same run without a profile."""
    return tiny.losses(tiny.run(tiny.config(tiny.write_data(tmp_path_factory.mktemp("plain")), train_iters=6, num_layers=1)))


@pytest.mark.parametrize(
    ("start", "end", "first"), [(2, 4, 3), pytest.param(0, 2, 1, marks=pytest.mark.nightly(3)), (5, 9, 6)]
)  # the last: it ends before the profile
def test_the_iterations_after_start_to_end_are_traced(
    prefix: Path, plain: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int, end: int, first: int
):
    rows = tiny.run(settings(prefix, tmp_path, start, end))
    assert tiny.losses(rows) == plain
    name = f"rank-0.iterations-{first}-{min(end, 6)}.pt.trace.json.gz"
    assert written(capsys.readouterr().out) == [name]
    (trace,) = traces(tmp_path).values()
    assert len(steps_of(trace)) == min(end, 6) - start
    assert [file.name for file in tmp_path.glob("*.gz")] == [name]
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::addmm" in names or "aten::mm" in names or "aten::matmul" in names


def test_a_run_that_fails_writes_no_trace_and_can_be_followed_by_another(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def failing(self: Trainer, due: Any, verdict: Any) -> Any:
        raise ValueError("no longer")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_after_step", failing)
        with pytest.raises(ValueError, match="no longer"):
            tiny.run(settings(prefix, tmp_path, 0, 4))
    assert traces(tmp_path) == {}
    tiny.run(settings(prefix, tmp_path, 1, 2))
    assert list(traces(tmp_path)) == ["rank-0.iterations-2-2.pt.trace.json.gz"]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, **flags: Any) -> tuple[Profiles, list[Any]]:
    """Profiles of rank 0 of 1 with CUDA's calls recorded instead of made."""
    calls: list[Any] = []
    runtime = SimpleNamespace(cudaProfilerStart=lambda: calls.append("start"), cudaProfilerStop=lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": len(calls)})
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda **options: torch.autograd.profiler.record_function("nvtx"))
    return Profiles(tiny.config("corpus", **flags).profiling, Path(), 10, Unwritten()), calls


@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_nsys_gets_the_iterations_after_start_to_end_of_the_given_ranks(
    one_process: None, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]
):
    made, calls = on_a_gpu(monkeypatch, profile=True, profile_step_start=2, profile_step_end=4, profile_ranks=ranks)
    made.begin(0)
    for iteration in range(1, 7):
        made.before(iteration)
        calls.append(iteration)
        made.after(iteration)
    made.close()
    assert calls == ([1, 2, "synchronize", "start", 3, 4, "synchronize", "stop", 5, 6] if 0 in ranks else [1, 2, 3, 4, 5, 6])


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["none", "step"])
def test_kernels_of_captured_steps_are_in_the_trace(prefix: Path, tmp_path: Path, graph: str):
    snapshot = tmp_path / "snapshot.pickle"
    more = {"cuda_graph": graph, "opt_level": "O2", "record_memory_history": True, "memory_snapshot_path": str(snapshot)}
    tiny.run(settings(prefix, tmp_path, 4, 6, **more))
    (trace,) = traces(tmp_path).values()
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) > 50
    assert pickle.loads(snapshot.read_bytes())["segments"]
