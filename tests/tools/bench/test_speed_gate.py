"""The gate with injected times: green on the same, red on a slowed case, and what is refused; the contestants of tiny models on the CPU."""

import csv
import io
import json
from typing import ClassVar

import pytest
import torch

from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
from tools.bench import speed_gate
from tools.bench.speed_gate import CASES, Measured, judge, ratio

GPU = "NVIDIA H100"
TIMES = {  # ms of a step on an unchanged tree
    "trainer O0": 100.0,
    "trainer O2": 70.0,
    "trainer O3": 65.0,
    "trainer coat": 75.0,
    "two-lines msamp captured": 79.0,
    "two-lines torch compiled": 99.0,
    "two-lines torchao captured": 98.0,
    "linear bf16": 2.0,
    "linear fp8": 1.2,
}


class Fake:
    """A contestant with given times; the clock of the whole GPU drifts by 20 % over the rounds."""

    turns: ClassVar[list[str]] = []  # names, in the order of their steps

    def __init__(self, name, slowed=1.0):
        self.name, self.slowed, self.built, self.closed = name, slowed, False, False

    def build(self):
        self.built = True

    def steps(self, number):
        assert self.built
        assert not self.closed
        drift = 1 + 0.2 * (len(Fake.turns) // 2 % 8) / 8
        Fake.turns.append(self.name)
        times = [TIMES[self.name] * self.slowed * drift] * (number - 1)
        return [*times, 5 * TIMES[self.name]]  # one step was interrupted

    def close(self):
        self.closed = True


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """Runs the gate with fake contestants: words of the command line and slowed contestants -> its exit code."""
    started = []

    def run(*words, slowed=None):
        started.clear()
        Fake.turns.clear()

        def start(name, options):
            started.append(Fake(name, (slowed or {}).get(name, 1.0)))
            return started[-1]

        monkeypatch.setattr(speed_gate, "Contestant", start)
        monkeypatch.setattr(speed_gate, "require", lambda cases: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
        monkeypatch.setattr(
            speed_gate.rows, "machine", lambda commit: dict.fromkeys(("date", "commit", "driver", "torch"), "x") | {"gpu": GPU}
        )
        return speed_gate.main([*words, "--csv", str(tmp_path / "gate.csv")])

    run.started, run.file = started, tmp_path / "gate.csv"
    return run


def test_green_three_times_on_the_same_and_red_on_a_slowed_case(gate, capsys):
    assert gate("--write") == 0
    with gate.file.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["case"] for line in lines] == list(CASES)
    assert float(lines[0]["ratio"]) == 0.7
    for _ in range(3):
        assert gate() == 0
    assert "no case lost more than 3 %" in capsys.readouterr().out
    assert gate(slowed={"trainer O3": 1.02}) == 0
    assert gate(slowed={"trainer O3": 1.04}) == 1
    printed = capsys.readouterr().out
    assert "LOST trainer-O3: ratio 0.6760 (0.6760 to 0.6760), committed 0.6500: +4.0 %, more than 3 %" in printed
    assert printed.count("LOST") == 1
    assert gate(slowed={"two-lines torchao captured": 0.9}) == 1, "a faster baseline is a loss too: the promise is a ratio"
    assert gate("--cases", "linear", "--rounds", "3", slowed={"trainer O3": 2.0}) == 0
    assert Fake.turns == [f"linear {side}" for side in ("bf16", "fp8", "fp8", "bf16", "bf16", "fp8")]


def test_the_ratio_by_hand():
    found = ratio([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]], [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    assert found == Measured(0.75, 0.5, 1.0, 2.0, 2.0)
    assert judge({"linear": found}, {"linear": 0.75}) == []
    assert judge({"linear": found}, {"linear": 0.74}) == []
    assert len(judge({"linear": found}, {"linear": 0.72})) == 1
    assert len(judge({"linear": Measured(float("nan"), 1, 1, 1, 1)}, {"linear": 0.72})) == 1


TINY_TRAINER = (
    "--preset 125m --micro-batch-size 1 --vocab-size 64 --flags='--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16'"
)


@pytest.mark.parametrize("contestant", ["linear fp8", "linear bf16", "trainer O2"])
def test_a_contestant_takes_the_steps_that_it_is_asked_for(contestant, monkeypatch, capsys):
    with cpu_home():  # else this process would stay in it
        try:
            takes_steps(contestant, monkeypatch, capsys)
        finally:
            process_groups.shutdown()


def takes_steps(contestant, monkeypatch, capsys):
    monkeypatch.setattr(speed_gate.sys, "stdin", io.StringIO("\n2\n3\n"))
    words = ["--warm-up", "1", f"--trainer-flags={TINY_TRAINER}", "--linear-tokens", "16", "--linear-width", "32"]
    assert speed_gate.main([*words, "--serve", contestant]) == 0
    ready, *measured = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"captured", "gib"} <= ready.keys()
    assert [len(times) for times in measured] == [2, 3]
    assert all(ms > 0 for times in measured for ms in times)


@pytest.mark.gpu
def test_a_gpu_measures_a_ratio(tmp_path, capfd):
    words = ["--cases", "linear", "--rounds", "3", "--csv", str(tmp_path / "gate.csv"), "--commit", "abc"]
    assert speed_gate.main([*words, "--write"]) == 0
    assert speed_gate.main(words) in (0, 1)
    assert "linear fp8: replayed graphs" in capfd.readouterr().out
