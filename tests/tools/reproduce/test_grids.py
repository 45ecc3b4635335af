"""Memory and volume from shapes, against counts by hand."""

from pathlib import Path

import pytest

from tools.docs.evidence import COMPUTED, read
from tools.reproduce import grids
from tools.reproduce.entry import Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))
LARGEST = ["table5", "175b", "O3", "4"]  # of the planner's rows


def by_quantity(run):
    return {finding.quantity: finding.ours for finding in run(TASK)}


def test_the_volume_of_weights_by_hand():
    config = grids.configuration("7b", "O0")
    parameters = 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096 + 50304 * 4096
    assert grids.weight_volume(config, 32) == pytest.approx(parameters * 6 * 31 / 32 / 2**30)
    linear = 32 * 12 * 4096**2
    low = 2 * linear + 4 * 50304 * 4096 + 8 * (32 * 13 * 4096 + 2 * 4096)
    assert grids.weight_volume(grids.configuration("7b", "O3"), 32) == pytest.approx(low * 31 / 32 / 2**30)


def test_fp8_saves_a_half_where_the_paper_has_a_third_and_175b_fits_at_4096():
    found = by_quantity(grids.table5)
    assert 40 < found["7b, memory saved by FP8"] < 50
    assert all(60 < found[f"{model}, weight-related volume saved by FP8"] < 70 for model in grids.GRIDS)
    held = {level: grids.fullest(grids.configuration("175b", level, "--seq-length 4096"), 32) for level in ("O0", "O3")}
    assert held["O3"] < grids.CARD - grids.memory.RESERVED / grids.GIB < held["O0"]


def test_gb_are_gib_and_what_no_run_has_is_predicted_or_said():
    found = {finding.quantity: finding for finding in grids.table5(TASK)}
    units = {finding.unit for quantity, finding in found.items() if quantity.endswith(("BF16", "FP8")) and "saved" not in quantity}
    assert units == {"GiB"}
    for model in grids.GRIDS:
        assert found[f"{model}, Transformer Engine: memory"].ours == grids.NOT_MEASURED
        for quantity, most in ((grids.RATE5, 12), ("MFU on the grid", 60)):
            shares = {name: finding for name, finding in found.items() if name.startswith(model) and quantity in name}
            assert len(shares) == 4
            assert all(finding.paper for finding in shares.values())
            (te,) = [finding for finding in shares.values() if finding.ours == grids.NOT_MEASURED]
            assert ", TE," in te.quantity
            assert all(0 < finding.ours < most and name.endswith(", predicted") for name, finding in shares.items() if finding is not te)
    predicted = found["175b, FP8, micro-batch 4: samples per second, predicted"]
    (planned,) = (row for row in read(COMPUTED[2]) if [row["what"], row["model"], row["precision"], row["micro_batch"]] == LARGEST)
    assert (predicted.ours, predicted.paper) == (float(planned["samples_s"]), 39.3)


def test_mfu_and_rate_of_a_planned_grid_by_hand():
    one = grids.planner.planned5("7b", 32, 2, "O3")
    mfu, rate = grids._shares5(one, 32)
    linear = 6 * (32 * 12 * 4096**2 + 50304 * 4096)  # FLOPs per token; attention adds a causal half of 12 x layers x width x length
    flops = (linear + 6 * 32 * 4096 * 2048) * 2048 * 2048  # a batch of 2,048 sequences
    assert mfu == pytest.approx(100 * flops / one.step.total / 32 / 1979e12, rel=0.01)
    assert rate == pytest.approx(100 * one.step.seconds["data-parallel, exposed"] / sum(one.step.seconds.values()))


def test_the_largest_model_fits_and_one_step_more_does_not():
    layers = grids.largest("O3", 32)
    room = grids.CARD - grids.memory.RESERVED / grids.GIB
    held = [grids.fullest(grids.configuration("175b", "O3", f"--num-layers {n}"), 32) for n in (layers, layers + 4)]
    assert held[0] <= room < held[1]


def test_collages_cells_are_those_of_its_table():
    found = {finding.quantity: finding for finding in grids.neox(TASK)}
    cells = [finding for finding in found.values() if finding.paper in ("fits", "does not fit")]
    assert len(cells) == 16
    assert found["cells that agree"].ours == sum(finding.ours == finding.paper for finding in cells)
    assert found["bf16-a, micro-batch 1, 1024 tokens"].ours == "fits"


def test_collages_savings_on_its_grids_are_largest_for_openllama_and_the_means_are_of_all_models():
    found = {finding.quantity: finding for finding in grids.saved_by_collage(TASK)}
    for option, paper in grids.MEAN4.items():
        saved = {model: found[f"{option}, {model}: saved against D"].ours for model in grids.MODELS4}
        held = [found[f"{name}, 6.7B: fullest"].ours for name in (option, "d")]
        assert saved["6.7B"] == pytest.approx(100 * (1 - held[0] / held[1]))
        assert max(saved, key=saved.get) == "OpenLLaMA-7B"
        mean = found[f"{option}: saved against D, mean of all models"]
        assert mean.ours == pytest.approx(sum(saved.values()) / 5)
        assert mean.paper == paper
    # A pair of BF16 numbers saves 4 bytes per parameter against D's 16 + 2 of gradients that accumulate, an eighth of 6.7B per card.
    apart = found["d, 6.7B: fullest"].ours - found["plus, 6.7B: fullest"].ours
    assert apart == pytest.approx(4 * 6.66e9 / 8 / 2**30, rel=0.01)


def grid_row(case, level, table7_mib, exposed, commit="abc1234", tp=2):
    told = {
        "date": "2026-11-21",
        "commit": commit,
        "gpu": "H",
        "torch": "2.11",
        "case": case,
        "level": level,
        "preset": "1.3b",
        "tp": tp,
        "pp": 1,
        "vpp": 1,
    }
    told |= {"dp": 1, "sp": "on" if tp > 1 else "off", "tp_wire": "bf16", "micro_batch": 8, "micro_batches": 1, "gpus": 2, "p2p": "on"}
    told |= {"table7_mib": table7_mib, "ms": 100, "output_mib": 0, "grad_output_mib": 0, "exposed_share": exposed}
    return {name: str(value) for name, value in told.items()}


def test_what_ranks_sent_stands_over_what_shapes_say():
    """24 layers x 2 of a kind x 3 transfers of 16,384 x 2,048 BF16 elements, of which a rank of two sends half: 4,608 MiB."""
    case = "O0 --tensor-model-parallel-size 2 --sequence-parallel"
    rows = [
        grid_row(case, "O0", 1, 0.3, "old1234"),
        grid_row(case, "O0", 4608, 0.2, "new1234"),
        grid_row(f"{case} --tp-wire fp8", "O0", 9216, ""),
        grid_row("O0", "O0", 5, 0.9, tp=1),
        grid_row("megatron bf16", "", 0, "") | {"tp": "", "sp": ""},
    ]
    found = {finding.quantity: finding for finding in grids.counted(rows)}
    told = "1.3b, TP 2 x PP 1 x DP 1, O0"
    assert found[f"{told}: volume counted over shapes"].ours == pytest.approx(1.0)
    where = found[f"{told}: volume counted over shapes"].where
    assert {name: where[name] for name in ("date", "commit", "gpu", "torch")} == {
        "date": "2026-11-21", "commit": "new1234", "gpu": "2 x H", "torch": "2.11",
    }  # fmt: skip
    assert found[f"{told} --tp-wire fp8: volume counted over shapes"].ours == pytest.approx(2.0)
    assert found[f"{told}: share of a step in which only NCCL ran"].ours == pytest.approx(20.0)
    assert len(found) == 4


def test_memory_of_ranks_stands_beside_their_state():
    def row(case, zero, least, most, gpus=2, commit="abc1234"):
        told = {
            "preset": "1.3b",
            "gpus": gpus,
            "case": case,
            "zero": zero,
            "rest_gib_min": least,
            "rest_gib_max": most,
            "commit": commit,
            "gpu": "H",
        }
        return {name: str(value) for name, value in told.items()}

    rows = [row("O3", "on", 1, 9, commit="old1234"), row("O3", "on", 5.0, 5.25), row("O1", "off", 7, 8), row("megatron bf16", "", "", 9)]
    found = {finding.quantity: finding for finding in grids.at_rest(rows)}
    assert found["1.3b, DP 2, O3: memory of a rank at rest"].ours == 5.25
    assert found["1.3b, DP 2, O3: spread at rest"].ours == 0.25
    assert found["1.3b, DP 2, O3: spread at rest"].where["commit"] == "abc1234"
    linear, embedding, small = 24 * 12 * 2048**2, 50304 * 2048, (24 * 13 + 2) * 2048
    state = linear * (1 + 6 / 2) + embedding * (2 + 7 / 2) + small * (2 + 16 / 2)
    assert found["1.3b, DP 2, greedy-cut from shapes: state of a rank"].ours == pytest.approx(state / 2**30, rel=1e-3)
    assert len(found) == 4


def test_the_peak_of_a_model_of_table_5_is_beside_its_dry_run():
    told = {"preset": "7b", "micro_batch": "2", "gpus": "2", "zero": "on", "rest_gib_min": "20", "rest_gib_max": "20", "gpu": "H200"}
    cases = ("O0 --use-distributed-optimizer", "O3 --use-distributed-optimizer")
    rows = [told | {"case": case, "peak_gib_max": peak} for case, peak in zip(cases, ("70", "35"), strict=True)]
    found = {finding.quantity: finding.ours for finding in grids.at_rest(rows)}
    for level, peak in (("O0", 70), ("O3", 35)):
        words = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 2"
        dry = grids.fullest(grids.configuration("7b", level, f"{words} --global-batch-size 4"), 2)
        assert found[f"7b, DP 2, {level}, micro-batch 2: peak of the fullest rank"] == peak
        assert found[f"7b, DP 2, {level}, micro-batch 2: peak of the fullest rank over the dry run's"] == pytest.approx(peak / dry)
        assert 0.9 < peak / dry < 1.1


@pytest.mark.parametrize("name", ["fp8lm-table7", "fp8lm-table8"])
def test_rows_of_several_gpus_on_file(name):
    entry = next(one for one in grids.ENTRIES if one.name == name)
    assert list(entry.pieces("toy")) == ["whole"]
    found = list(entry.run(Task("kept", grids.MEASURED, Path("text"), Path("folder"))))
    cards = {"2 x NVIDIA H200", "4 x NVIDIA H200"} | ({"2 x NVIDIA H100 80GB HBM3"} if name == "fp8lm-table7" else set())
    assert {finding.where["gpu"] for finding in found if finding.where} == cards
    if name == "fp8lm-table7":
        assert {finding.ours for finding in found if "over shapes" in finding.quantity} == {1.0}
        return
    lines = {finding.quantity: finding.ours for finding in found}
    for gpus in (2, 4):
        state = lines[f"1.3b, DP {gpus}, greedy-cut from shapes: state of a rank"]
        assert state < lines[f"1.3b, DP {gpus}, O3: memory of a rank at rest"] < 1.05 * state
