"""The bench of own loops, on a CPU and a toy shape."""

import argparse

import pytest

from helpers import hosts
from megatron.lm.processes import process_groups
from tools.bench import bench_own_loop

hosts.need("transformers")
TOY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
OPTIONS = argparse.Namespace(level="O3", warm_up=1, steps=2, commit="abc", fp8_min_gain=0)


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(bench_own_loop.SHAPES, "toy", (bench_own_loop.LLAMA | TOY, 2, 32))
    yield
    process_groups.shutdown()  # the trainer's case leaves the default group


@pytest.mark.parametrize("case", ["trainer:bf16:captured", "msamp:fp32:eager", "torch:bf16:eager", "msamp:bf16:update"])
def test_a_row_of_each_system(case):
    row = bench_own_loop.measure(case, "toy", OPTIONS)
    assert tuple(row) == bench_own_loop.COLUMNS
    assert row["ms"] > 0
    assert row["level"] == ("" if case.startswith("torch") else "O3")


def test_an_unknown_case_is_refused():
    with pytest.raises(ValueError, match="jax"):
        bench_own_loop.measure("jax:bf16:eager", "toy", OPTIONS)
