"""Collage's entries that train, and what is taken of rows on file."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.lm.tools.report import Run
from tools.docs.cells import PRECISIONS
from tools.docs.evidence import read
from tools.docs.losses import CURVES
from tools.reproduce import collage
from tools.reproduce.compare_precisions import folder_of
from tools.reproduce.entry import Task

TASK = Task("kept", "whole", Path("text"), Path("folder"))


def test_kept_rows_give_their_place_and_ratios():
    found = {finding.quantity: finding for finding in collage.table7(TASK)}
    plus = found["plus: speed over D's; ours at 125M, the paper's at 1.3B"]
    rows = {row["precision"]: row for row in read(PRECISIONS)}
    assert plus.ours == pytest.approx(float(rows["collage-plus"]["tokens_s"]) / float(rows["bf16-d"]["tokens_s"]))
    assert plus.where["gpu"] == "NVIDIA H200"
    saved = {finding.quantity: finding.ours for finding in collage.figure4(TASK)}
    memory = [float(rows[name]["peak_gib"]) for name in ("collage-plus", "bf16-d")]
    assert saved["plus, 125M: peak memory saved against D"] == pytest.approx(100 * (1 - memory[0] / memory[1]))
    steps = {
        row["case"]: float(row["peak_gib"])
        for row in read(collage.throughput.STEP)
        if row["commit"] == "6d672c82" and row["preset"] == "1.3b"
    }
    assert saved["light, 1.3B: peak memory saved against D"] == pytest.approx(100 * (1 - steps["collage-light"] / steps["bf16-d"]))
    four = [saved[f"plus, {model}: peak memory saved against D"] for model in ("125M", "1.3B", "2.6B", "6.7B")]
    assert saved["plus: saved against D, mean of the models"] == pytest.approx(sum(four) / 4)


def test_perplexities_over_ds_pair_seeds():
    """Plus has three seeds and D one, the one in which most precisions end highest: the mean of plus over that seed reads 2 % too low."""
    losses = {}
    for row in read(CURVES):
        if row["kind"] == "valid":
            losses[row["run"]] = float(row["loss"])  # the last one stays
    found = list(collage.table5(TASK))
    ratios = [finding for finding in found if finding.quantity == "plus, 125M: validation perplexity over D's"]
    assert [finding.seed for finding in ratios] == [1234]
    assert ratios[0].ours == pytest.approx(math.exp(losses["collage-plus_0"] - losses["bf16-d_0"]))
    assert ratios[0].ours == pytest.approx(1.0037, abs=1e-4)
    assert sum("perplexity" in finding.quantity for finding in found) == 4
    piece = [finding for finding in collage.table6(replace(TASK, size="full", piece="beta2 0.95")) if finding.quantity.startswith("plus")]
    assert [finding.ours for finding in piece] == [ratios[0].ours]


def courses(monkeypatch, losses):
    """Training runs that end at these losses; the loss of option a rises by 2 on the way."""

    def played(variant, beta2, loop, text, seed, build=None):
        yield {"step": 10, "loss": 4.0}
        yield {"step": 20, "loss": 6.0 if variant == "a" else 3.5, "valid_loss": losses[variant] + (seed - 1234) + beta2}

    monkeypatch.setattr(collage, "collage", played)
    monkeypatch.setattr(collage, "bytes_of", lambda text: None)


def test_figure_3_middle_has_the_loss_of_every_option_and_seed(monkeypatch):
    courses(monkeypatch, dict.fromkeys(("fp32", "d", "plus", "light", "kahan", "a"), 3.0))
    one = next(entry for entry in collage.ENTRIES if entry.name == "collage-figure3-middle")
    pieces = one.pieces("small")
    assert len(set(pieces)) == len(pieces) == 6 * collage.SEEDS["small"]
    loss = [finding for finding in one.run(Task("small", "kahan, seed 1235", Path("text"), Path("folder"))) if finding.x is None]
    assert [(finding.quantity, finding.seed, finding.ours) for finding in loss] == [("kahan: validation loss", 1235, 4.999)]
    assert {other for _, other in one.same_loss} == {f"{name}: validation loss" for name in ("plus", "light", "a", "kahan")}


def test_table_5_right_is_perplexity_over_ds_of_the_same_seed_and_how_far_the_loss_rose(monkeypatch):
    courses(monkeypatch, {"d": 3.0, "plus": 3.01, "light": 3.02, "a": 3.5})
    one = next(entry for entry in collage.ENTRIES if entry.name == "collage-table5-right")
    assert len(one.pieces("small")) == 2 * collage.SEEDS["small"]
    found = {finding.quantity: finding for finding in one.run(Task("small", "beta2 0.99, seed 1236", Path("text"), Path("folder")))}
    plus = found["plus, beta2 0.99: validation perplexity over D's"]
    assert (plus.ours, plus.paper, plus.seed) == (pytest.approx(math.exp(0.01)), pytest.approx(4.62 / 6.42), 1236)
    assert found["d, beta2 0.99: validation loss"].ours == pytest.approx(3.0 + 2 + 0.99)
    rises = {name[0]: finding.ours for name, finding in found.items() if "largest rise" in name}
    assert rises == {"d": -0.5, "p": -0.5, "l": -0.5, "a": 2.0}
    assert one.headline in found
    assert {quantity for pair in one.same_loss for quantity in pair if "0.99" in quantity} <= found.keys()


def test_collage_table_6_at_125m_says_what_its_trainings_and_their_records_say(monkeypatch, tmp_path):
    """Five trainings stand in for those of a GPU, each with a loss and a record of its own."""
    losses = {"bf16-d": 5.0, "collage-plus": 5.01, "collage-light": 5.05, "bf16-a": 5.2, "bf16-dmw": 5.1}
    asked = []

    def trained(case, seed, steps, flags, data, folder):
        precision, _, beta2 = case.split()
        asked.append((precision, beta2, seed, steps, flags))
        return Run(name=case, train=[{"iteration": 10, "loss": 9.0}], valid=[{"iteration": steps, "loss": losses[precision]}])

    totals = [None, {"lost": 0.25, "arrived": 0.5}, {"lost": 0.75, "arrived": None}]
    monkeypatch.setattr(collage, "trained", trained)
    monkeypatch.setattr(collage, "read_steps", lambda file: [{"total": total} for total in totals])
    task = Task("full", "beta2 0.999", Path("text"), tmp_path)
    found = {finding.quantity: finding for finding in collage.table6(task)}
    plus = found["plus, beta2 0.999: validation perplexity over D's"]
    assert plus.ours == pytest.approx(math.exp(0.01))
    assert plus.paper == pytest.approx(15.18 / 15.03)
    assert found["d-mw, beta2 0.999: validation perplexity over D's"].paper is None
    assert found["a, beta2 0.999: lost arithmetic, mean"].ours == 50
    assert found["a, beta2 0.999: share of the update that arrives, mean"].ours == 50
    assert sorted(precision for precision, *_ in asked) == sorted(losses)
    assert {beta2 for _, beta2, *_ in asked} == {"0.999"}
    assert all("--record-precision" in flags for *_, flags in asked)
    on_file = list(collage.table6(replace(task, piece="beta2 0.95")))
    assert on_file[0].quantity == "a, beta2 0.95: validation perplexity over D's"
    assert on_file[0].where["commit"] == "de29eee"
    assert len(asked) == 5


def test_table_6_by_seed_pairs_d_and_the_others_at_each_beta2(tmp_path, monkeypatch):
    losses = {("bf16-d", 0.999): (5.0, 5.1), ("bf16-a", 0.999): (5.2, 5.3), ("bf16-d", 0.95): (4.9,), ("collage-plus", 0.95): (4.95, 4.8)}
    names = {key: f"{key[0]} --adam-beta2 {key[1]}" for key in losses}
    with (tmp_path / "precisions.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("precision", "commit"), *((name, "abc1234") for name in names.values())])
    with (tmp_path / "curves.csv").open("w", newline="") as stream:
        runs = [(f"{folder_of(names[key])}_{i}", "valid", 2, loss) for key, values in losses.items() for i, loss in enumerate(values)]
        csv.writer(stream).writerows([("run", "kind", "iteration", "loss"), *runs])
    monkeypatch.setattr(collage, "BETA2", str(tmp_path))
    found = {(finding.quantity, finding.seed): finding for finding in collage.table6_by_seed(TASK)}
    (entry,) = [one for one in collage.ENTRIES if one.name == "collage-table6-seeds"]
    for seed in (1234, 1235):
        assert found[entry.headline, seed].ours == pytest.approx(math.exp(0.2))
        assert found[entry.headline, seed].paper == 18.17 / 15.03
    ratios = [key for key in found if key[0] == "plus, beta2 0.95: validation perplexity over D's"]
    assert ratios == [("plus, beta2 0.95: validation perplexity over D's", 1234)]
    assert found["plus, beta2 0.95: validation loss", 1235].ours == 4.8


def test_the_second_half_of_table_6_has_twice_the_batch_and_as_many_tokens(monkeypatch, tmp_path):
    asked = []

    def trained(case, seed, steps, flags, data, folder):
        asked.append((steps, flags))
        return Run(name=case, train=[], valid=[{"iteration": steps, "loss": 5.0 + ("bf16-a" in case)}])

    monkeypatch.setattr(collage, "trained", trained)
    monkeypatch.setattr(collage, "read_steps", lambda file: [{"total": {"lost": 0.25, "arrived": 0.5}}])
    entry = next(one for one in collage.ENTRIES if one.name == "collage-table6")
    assert len(entry.pieces("full")) == 6
    doubled, *_, last = (piece for piece in entry.pieces("full") if piece.endswith(collage.TWICE))
    found = {finding.quantity: finding for finding in collage.table6(Task("full", doubled, Path("text"), tmp_path))}
    a = found["a, beta2 0.999, twice the batch: validation perplexity over D's"]
    assert (a.ours, a.paper) == (pytest.approx(math.e), pytest.approx(15.33 / 14.59))
    assert {(steps, flags.split(" --record-p")[0]) for steps, flags in asked} == {(1000, "--micro-batch-size 8 --global-batch-size 8")}
    assert {flags.split()[-1] for _, flags in asked} == {"100"}
    beta2, loop, _ = collage.setting6(doubled, collage.LOOPS["small"])
    assert (beta2, loop.batch, loop.steps) == (0.999, 32, 200)
    asked.clear()
    list(collage.table6(Task("full", last, Path("text"), tmp_path)))  # which no file has
    assert {steps for steps, _ in asked} == {1000}
    asked.clear()
    list(collage.table6(Task("full", "beta2 0.99", Path("text"), tmp_path)))
    assert {(steps, flags.split(" --record-p")[0]) for steps, flags in asked} == {(2000, "--micro-batch-size 4 --global-batch-size 4")}
