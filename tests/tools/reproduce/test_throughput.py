"""Entries that time whole steps on a GPU: what they ask of the benchmarks, and what they make of their rows."""

import csv
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from tools.bench.rows import machine
from tools.reproduce import throughput
from tools.reproduce.entry import Task


def task(piece: str, folder: Path) -> Task:
    return Task("full", piece, folder / "text", folder / "kept" / "entry")


class Bench:
    """Plays both benchmarks: reads their command line as they do, and writes rows as they would, of `trials`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trials: dict[tuple[str, int], tuple[float, float]]) -> None:
        self.trials, self.flags = trials, []
        monkeypatch.setattr(throughput, "rows_of", self.rows)

    def rows(self, tool, words, file, folder="tools/reproduce", goes_on=False):
        assert goes_on == (tool == "coat_memory")  # a search is resumed trial by trial
        values = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
        flags = next(word.partition("=")[2] for word in words if word.startswith("--flags="))
        self.flags.append((values["--preset"], int(values["--micro-batch-size"]), flags))
        key = "--cases" if tool == "coat_memory" else "--levels"
        start = words.index(key) + 1
        cases = words[start : next(i for i in range(start, len(words)) if words[i].startswith("--"))]
        assert (folder, tool) in {("tools/reproduce", "coat_memory"), ("tools/bench", "bench_step")}
        found = [(case, size, told) for (case, size), told in self.trials.items() if case in cases]
        file.parent.mkdir(parents=True, exist_ok=True)
        where = {key: value for key, value in machine(values.get("--commit")).items() if key in ("commit", "gpu", "torch")}
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [*where, "case", "micro_batch", "ms", "tokens_s_gpu", "peak_gib"])
            writer.writeheader()
            for case, size, (speed, peak) in found:
                there = {"ms": 1.0, "tokens_s_gpu": speed, "peak_gib": peak} if speed else {}
                writer.writerow({**where, "case": case, "micro_batch": size, **there})
            if goes_on:  # of a call of another day that was cut off
                writer.writerow(
                    {**where, "commit": "0ther", "case": found[0][0], "micro_batch": 64, "tokens_s_gpu": 1e6, "ms": 1, "peak_gib": 1}
                )
        with file.open(newline="") as stream:
            return list(csv.DictReader(stream))


def quantities(findings):
    found = list(findings)
    assert len({finding.quantity for finding in found}) == len(found)
    return {finding.quantity: (finding.ours, finding.paper) for finding in found}


def test_table_5_beside_o0_with_its_micro_batch_and_with_the_largest(tmp_path, monkeypatch):
    trials = {("O0", 2): (100.0, 70.0), ("O0", 4): (0.0, 0.0), ("O1", 2): (130.0, 60.0), ("O2", 2): (140.0, 50.0)}
    bench = Bench(monkeypatch, trials | {("O3", 2): (150.0, 40.0), ("O3", 4): (180.0, 60.0)})
    found = quantities(throughput.table5(task("7b", tmp_path)))
    assert found["7b, O3, micro-batch 2: times O0's speed"] == (1.5, pytest.approx(219.8 / 159.2))
    assert found["7b, O3, each at its largest: times O0's speed"] == (1.8, pytest.approx(230.5 / 159.2))
    assert found["7b, O1, micro-batch 2: times O0's speed"] == (1.3, None)
    assert found["7b, O3: largest micro-batch"] == (4.0, None)
    assert found["7b, O0, micro-batch 2: peak memory"] == (70.0, None)
    assert bench.flags == [("7b", 2, "--fp8-min-gain 0")]


def test_a_baseline_that_does_not_fit_leaves_the_others_their_own_figures(tmp_path, monkeypatch):
    Bench(monkeypatch, {("O0", 1): (0.0, 0.0), ("O1", 1): (0.0, 0.0), ("O2", 1): (9.0, 99.0), ("O3", 1): (8.0, 90.0)})
    found = quantities(throughput.table5(task("13b", tmp_path)))
    assert found["13b, O0, micro-batch 1"] == ("does not fit", None)
    assert found["13b, O3, micro-batch 1: tokens a second"] == (8.0, None)
    assert not [quantity for quantity in found if "times" in quantity]


UNFUSED = {"bf16-a": (3.0, 1.78), "collage-light": (2.25, 1.74), "collage-plus": (2.0, 1.67)}


def test_collages_speeds_and_savings_are_against_option_d(tmp_path, monkeypatch):
    trials = {("bf16-d", 2): (100.0, 80.0), ("bf16-a", 2): (200.0, 40.0), ("collage-light", 2): (190.0, 60.0)}
    bench = Bench(monkeypatch, trials | {("collage-plus", 2): (180.0, 64.0)})
    found = quantities(throughput.collage(task("2.7b", tmp_path)))
    assert found["2.7b, collage-plus: speed over D's"] == (pytest.approx(1.8), 2.48)
    assert found["2.7b, collage-plus: peak memory saved against D"] == (pytest.approx(20.0), None)
    assert found["2.7b, bf16-a: peak memory saved against D"] == (pytest.approx(50.0), None)
    ((preset, _, flags),) = bench.flags
    config = parse_args(["--preset", preset, "--micro-batch-size", "1", "--train-iters", "1", *flags.split()])
    shape = config.model
    assert (shape.num_layers, shape.hidden_size) == (32, 2560)
    assert 2.5e9 < 12 * shape.num_layers * shape.hidden_size**2 < 2.7e9


def test_coats_memory_and_speed_are_against_bf16(tmp_path, monkeypatch):
    Bench(monkeypatch, {("bf16", 1): (10.0, 100.0), ("O3", 1): (18.0, 60.0), ("coat", 1): (15.0, 50.0), ("coat", 2): (16.0, 60.0)})
    found = quantities(throughput.coat(task("llama2-7b", tmp_path)))
    assert found["llama2-7b, coat, micro-batch 1: times less memory"] == (2.0, 1.54)
    assert found["llama2-7b, coat, micro-batch 1: times bf16's speed"] == (1.5, 1.43)
    assert found["llama2-7b, O3, micro-batch 1: times less memory"] == (pytest.approx(1.67), None)
