"""Entries that train: Table 6's rows and what is taken of rows on file."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.tools.report import Run
from tools.precisions import case_flags
from tools.reproduce import short
from tools.reproduce.entry import Task

TASK = Task("kept", "whole", Path("text"), Path("folder"))


def test_the_rows_of_table_6_are_the_papers_formats():
    paper = {"#2a": ("fp16", "fp8-e4m3", "fp16"), "#2b": ("bf16", "fp8-e4m3", "fp16"), "#3": ("fp8-e4m3", "fp8-e4m3", "fp16")}
    paper["#4"] = ("fp16", "fp8-e4m3", "fp8-e4m3")
    for name, formats in paper.items():
        config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *case_flags(short.TABLE6[name])])
        from megatron.lm.plan import state_formats

        states = state_formats(config)["linear"][1]
        assert tuple(str(getattr(states, key)) for key in ("master", "m", "v")) == formats, name
    assert short.table6_pieces("full")[:7] == [*(f"{name} seed 1234" for name in short.TABLE6), "#1 seed 1235"]
    kept = {row["precision"]: row for row in short.read(short.PRECISIONS)}
    (zero,) = short.table6(replace(TASK, size="full", piece="#0 seed 1234"))
    assert (zero.ours, zero.where["commit"]) == (float(kept["fp32"]["valid_loss"]), kept["fp32"]["commit"])


def test_kept_rows_give_their_place_and_ratios():
    found = {finding.quantity: finding for finding in short.collage_table7(TASK)}
    plus = found["plus: speed over D's; ours at 125M, the paper's at 1.3B"]
    rows = {row["precision"]: row for row in short.read(short.PRECISIONS)}
    assert plus.ours == pytest.approx(float(rows["collage-plus"]["tokens_s"]) / float(rows["bf16-d"]["tokens_s"]))
    assert plus.where["gpu"] == "NVIDIA H200"
    saved = {finding.quantity: finding.ours for finding in short.collage_figure4(TASK)}
    memory = [float(rows[name]["peak_gib"]) for name in ("collage-plus", "bf16-d")]
    assert saved["plus, 125M: peak memory saved against D"] == pytest.approx(100 * (1 - memory[0] / memory[1]))
    steps = {
        row["case"]: float(row["peak_gib"])
        for row in short.read(short.throughput.STEP)
        if row["commit"] == "2c95adf" and row["preset"] == "1.3b"
    }
    assert saved["light, 1.3B: peak memory saved against D"] == pytest.approx(100 * (1 - steps["collage-light"] / steps["bf16-d"]))
    four = [saved[f"plus, {model}: peak memory saved against D"] for model in ("125M", "1.3B", "2.6B", "6.7B")]
    assert saved["plus: saved against D, mean of the models"] == pytest.approx(sum(four) / 4)
    assert len(list(short.collage_table5(TASK))) == 4
    assert len(list(short.figure4(TASK))) == 4


def test_collage_table_6_at_125m_says_what_its_trainings_and_their_records_say(monkeypatch, tmp_path):
    """Five trainings stand in for those of a GPU, each with a loss and a record of its own."""
    losses = {"bf16-d": 5.0, "collage-plus": 5.01, "collage-light": 5.05, "bf16-a": 5.2, "bf16-dmw": 5.1}
    asked = []

    def trained(case, seed, steps, flags, data, folder):
        precision, _, beta2 = case.split()
        asked.append((precision, beta2, seed, steps, flags))
        return Run(name=case, train=[{"iteration": 10, "loss": 9.0}], valid=[{"iteration": steps, "loss": losses[precision]}])

    totals = [None, {"lost": 0.25, "arrived": 0.5}, {"lost": 0.75, "arrived": None}]
    monkeypatch.setattr(short, "trained", trained)
    monkeypatch.setattr(short, "read_steps", lambda file: [{"total": total} for total in totals])
    task = Task("full", "beta2 0.999", Path("text"), tmp_path)
    found = {finding.quantity: finding for finding in short.collage_table6(task)}
    plus = found["plus, beta2 0.999: validation perplexity over D's"]
    assert plus.ours == pytest.approx(math.exp(0.01))
    assert plus.paper == pytest.approx(15.18 / 15.03)
    assert found["d-mw, beta2 0.999: validation perplexity over D's"].paper is None
    assert found["a, beta2 0.999: lost arithmetic, mean"].ours == 50
    assert found["a, beta2 0.999: share of the update that arrives, mean"].ours == 50
    assert sorted(precision for precision, *_ in asked) == sorted(losses)
    assert {beta2 for _, beta2, *_ in asked} == {"0.999"}
    assert all("--record-precision" in flags for *_, flags in asked)
    on_file = list(short.collage_table6(replace(task, piece="beta2 0.95")))
    assert on_file[0].quantity == "a, beta2 0.95: validation perplexity over D's"
    assert on_file[0].where["commit"] == "de29eee"
    assert len(asked) == 5
