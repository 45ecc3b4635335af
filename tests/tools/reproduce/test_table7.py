import argparse
import csv

import pytest
from megatron.core import parallel_state

from helpers import dist
from megatron.lm.build import build_training
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from tools.bench import bench_grid, bench_step
from tools.reproduce import table7

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 3, 48, 20, 2, 2
TINY = f"--seq-length {SEQUENCE} --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 2 --lr-warmup-iters 1"
GATHERED = "--tp-saved-input gathered"
CASES = {
    "O0": table7.scheme("O0"),
    "O1": table7.scheme("O1"),
    "O3": table7.scheme("O3"),
    "O3 --tp-wire fp8": table7.scheme("O3", tp_wire="fp8"),
    f"O3 {GATHERED}": table7.scheme("O3", saved_input="gathered"),
}
ROW = dict.fromkeys(("date", "commit", "gpu", *bench_grid.COLUMNS), "") | {
    "date": "2026-11-21",
    "commit": "abc1234",
    "gpu": "H200",
    "preset": "1.3b",
    "tp": "2",
    "pp": "1",
    "sp": "on",
    "p2p": "on",
    "tp_wire": "bf16",
    "micro_batch": "8",
    "micro_batches": "2",
}


def sent_in_a_step() -> list[dict[str, int]]:
    """By case: bytes that this rank sent in one step, by role."""
    found = []
    options = argparse.Namespace(preset="125m", micro_batch_size=MICRO_BATCH, micro_batches=MICRO_BATCHES, flags=TINY)
    for case in CASES:
        config = bench_grid.configuration(f"{case} --tensor-model-parallel-size 2 --sequence-parallel", options, 2)
        process_groups.initialize(config)
        training = build_training(config, 64)
        train_step(training, bench_step.random_batches(config, 64, process_groups.device()))
        sent = dict.fromkeys(bench_grid.ACTIVATIONS, 0)
        for (kind, collective), size in training.grad_sync.sent.rows().items():
            if kind == "activation":
                sent[bench_grid.role(collective)] += size
        found.append(sent)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.nightly
def test_what_is_computed_is_counted_to_the_byte():
    for rank in dist.run(sent_in_a_step, 2):
        for sent, wire in zip(rank, CASES.values(), strict=True):
            scope, everything = table7.volume(LAYERS, HIDDEN, SEQUENCE * MICRO_BATCH, 2, wire)
            assert sum(sent[name] for name in bench_grid.TABLE7) == scope * MICRO_BATCHES
            assert sum(sent[name] for name in (*bench_grid.TABLE7, "output", "grad_output")) == everything * MICRO_BATCHES
            assert [sent[name] > 0 for name in ("input_gather_again", "head", "pipeline")] == [wire.input_again > 0, True, False]


@pytest.mark.parametrize(("model", "case"), table7.PAPER)
def test_the_papers_volumes_come_out_to_the_digits_it_prints(model, case):
    row = next(row for row in table7.computed_rows(model) if row["case"] == case)
    assert float(row["scope_gib"]) == pytest.approx(row["paper_gb"], abs=0.05)


def test_a_small_volume_by_hand():
    assert table7.volume(1, 4, 6, 3, table7.Scheme(1, 2, 4, 8, 16)) == (2 * (2 * 2 * 4) * 7, 2 * (2 * 2 * 4) * 31)
    assert table7.volume(1, 4, 6, 3, table7.Scheme(1, 1, 2, None, 1)) == (2 * (2 * 2 * 4) * 4, None)


def test_changes_against_bf16():
    found = {row["case"]: row for row in table7.computed_rows("175b")}
    assert {case: (row["scope_change"], row["all_change"], row["paper_change"]) for case, row in found.items()} == {
        "O0": ("", "", ""),
        "the paper's FP8": ("-33.3%", "", "-33.9%"),
        "O1, O2": ("-33.3%", "-30.0%", ""),
        "O3": ("-50.0%", "-40.0%", ""),
        "O3 --tp-wire fp8": ("-50.0%", "-50.0%", ""),
        "O3 --tp-wire fp8 --tp-saved-input gathered": ("-66.7%", "-60.0%", ""),
    }
    assert (found["O3"]["tp"], found["O3"]["pp"], found["O3"]["dp"], found["O3"]["micro_batches"]) == (8, 4, 4, 128)
    assert float(found["O3"]["scope_step_gib"]) == pytest.approx(128 * float(found["O3"]["scope_gib"]), abs=0.1)


def test_measured_rows_compare_on_one_grid_and_the_last_of_a_case_counts():
    def row(case: str, table7_mib: float, output: float, **columns: str) -> dict[str, str]:
        sizes = {"table7_mib": str(table7_mib), "output_mib": str(output), "grad_output_mib": str(output)}
        return ROW | {"case": case, "level": case[:2]} | sizes | columns

    found = table7.measured_rows(
        [
            row("O0", 9.0, 9.0),
            row("O0", 4096.0, 1024.0),
            row("O3", 2048.0, 768.0, exposed_share="0.1"),
            row("O3", 1024.0, 768.0, micro_batch="4"),
            row("O3", 1024.0, 768.0, sp="off"),
            row("O3", 1024.0, 768.0, p2p="off"),
            row("O0 --seq-length 4096", 8192.0, 2048.0),
            row("O3 --seq-length 8192", 4096.0, 1024.0),
            row("", 0.0, 0.0),
        ]
    )
    assert [(line["case"], line["micro_batch"], line["scope_change"], line["all_change"]) for line in found] == [
        ("O0", "8", "", ""),
        ("O3", "8", "-50.0%", "-41.7%"),
        ("O3", "4", "", ""),
        ("O0 --seq-length 4096", "8", "", ""),
        ("O3 --seq-length 8192", "8", "", ""),
    ]
    assert (found[0]["scope_gib"], found[0]["scope_step_gib"], found[0]["all_gib"]) == ("2.000", "4.000", "3.000")
    assert found[0]["shapes_scope_gib"] == f"{24 * 6 * 2048 * 8 * 2048 * 2 / 2 / 2**30:.3f}"
    assert (found[1]["exposed_share"], found[1]["source"]) == ("0.1", "2026-11-21 abc1234")


def test_the_tool_prints_and_writes_a_table(tmp_path, capsys):
    grid, path = tmp_path / "grid.csv", tmp_path / "new" / "table7.csv"
    with grid.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ROW)
        writer.writeheader()
        writer.writerow(ROW | {"case": "O0", "level": "O0", "table7_mib": "1.0", "output_mib": "1.0", "grad_output_mib": "1.0"})
    assert table7.main(["--grid", str(grid), "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == table7.COLUMNS
    assert [row["model"] for row in rows] == ["13b"] * 6 + ["175b"] * 6 + ["1.3b"]
    assert all(name in printed for name in (*table7.COLUMNS, "4.688", "-50.0%"))
    assert table7.main(["--grid", str(tmp_path / "none.csv")]) == 0


def test_the_kept_table_has_these_columns():
    with open(table7.__file__.replace("table7.py", "results/table7.csv"), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == table7.COLUMNS
    computed = [row for row in rows if row["source"] == "computed"]
    again = [row for model in ("13b", "175b") for row in table7.computed_rows(model)]
    assert computed == [{name: str(value) for name, value in row.items()} for row in again]


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match=r"precision 'O4' is unknown; choose one of .*O1, O2, O3 "):
        table7.scheme("O4")
