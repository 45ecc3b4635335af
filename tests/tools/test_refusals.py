"""What benchmarks and reproductions refuse on their command lines, before anything runs."""

import importlib

import pytest
import torch

from helpers.refusals import code

REFUSALS = [
    ("bench.bench_attention", "", "GPU"),
    ("bench.bench_fsdp", "--cases O9", "O9"),
    ("bench.baselines.bench_moe_baselines", "--layers 0", "--layers"),
    ("bench.bench_kernels", "--repeats 1", "--repeats"),
    ("bench.bench_kernels", "--only sort", "sort"),
    ("bench.bench_kernels", "", "GPU"),
    ("bench.bench_optimizer", "--levels O9", "O9"),
    ("bench.bench_optimizer", "--levels O3+--optimizer-states+coat", "--optimizer-states"),
    ("bench.bench_outliers", "--factor 0.5", "--factor"),
    ("bench.bench_outliers", "--until 100", "--until"),
    ("bench.bench_step", "--steps 1", "--steps"),
    ("bench.bench_step", "--levels O9+--deterministic", "O9"),
    ("reproduce.compare_precisions", "--steps 1", "--steps"),
]


@pytest.mark.parametrize(("tool", "flags", "message"), REFUSALS)
def test_what_a_tool_refuses(tool: str, flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In the flags, `+` stands for a space within an argument."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert code(importlib.import_module(f"tools.{tool}").main, [word.replace("+", " ") for word in flags.split()]) == 2
    assert message in capsys.readouterr().err
