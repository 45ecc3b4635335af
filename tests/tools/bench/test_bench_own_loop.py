"""The bench of own loops, on a CPU and a toy shape."""

import argparse

import pytest

from helpers import dist, hosts
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
from tools.bench import bench_own_loop

hosts.need("transformers")
OPTIONS = argparse.Namespace(level="O3", warm_up=1, steps=2, commit="abc", fp8_min_gain=0)
bench_own_loop.SHAPES["toy"] = (bench_own_loop.llama(64, 2, 96, 4, 4, vocab_size=128), 2, 32)


def measured(case: str) -> dict:
    return bench_own_loop.measure(case, "toy", OPTIONS)


@pytest.fixture(autouse=True)
def _alone():
    with cpu_home():  # else the trainer's case leaves this process in it
        yield
    process_groups.shutdown()  # and the default group


@pytest.mark.parametrize("case", ["trainer:bf16:captured", "msamp:fp32:eager", "torch:bf16:eager", "msamp:bf16:update"])
def test_a_row_of_each_system(case):
    row = measured(case)
    assert tuple(row) == bench_own_loop.COLUMNS
    assert row["ms"] > 0
    assert row["level"] == ("" if case.startswith("torch") else "O3")


@pytest.mark.parametrize("case", ["jax:bf16:eager", "msamp:bf16:eager:zero"])
def test_an_unknown_case_and_parallelism_on_one_process_are_refused(case):
    with pytest.raises(ValueError, match=case):
        measured(case)


PARALLEL = ["msamp:bf16:captured:zero", "msamp:bf16:eager:fsdp", "torch:bf16:eager:ddp"]


def all_measured() -> list[dict]:
    return [measured(case) for case in PARALLEL]


def test_both_of_two_processes_have_the_row_of_the_slower():
    first, second = dist.run(all_measured, 2)
    assert first == second
    assert [(row["gpus"], row["parallel"]) for row in first] == [(2, case.rpartition(":")[2]) for case in PARALLEL]
