import csv

import pytest
import torch

from msamp.kernels.reference.adamw import Batch
from tools.bench import bench_kernels
from tools.bench.bench_kernels import Case


def test_a_row_compares_bytes_or_flops_with_the_ceiling(monkeypatch):
    """Of launches that take 1, 2 and 3 microseconds, next to ceilings of 4 TB/s and 800 TFLOP/s."""
    monkeypatch.setattr(bench_kernels, "times", lambda run, repeats: [repeats * 1e-6, 2e-6, 1e-6])
    moved, multiplied = (bench_kernels.measure(Case("x", int, **size), 3, 4e12, 800e12) for size in ({"bytes": 6e6}, {"flops": 4e8}))
    assert moved == {"kernel": "x", "us_p20": 1.4, "us": 2.0, "us_p80": 2.6, "tb_s": 3.0, "tflops": "", "share": 0.75}
    assert (multiplied["tb_s"], multiplied["tflops"], multiplied["share"]) == ("", 200, 0.25)


def test_updates_take_steps_and_read_and_write_their_tensors():
    elements = 4 * 12 * 32 * 32
    bytes_per_element = {}
    for case in bench_kernels.update(32, "cpu"):
        batch = next(x for x in case.run.args if isinstance(x, Batch))
        before = [step.item() for step in batch.steps]
        case.run()
        assert [step.item() for step in batch.steps] == [step + 1 for step in before]
        bytes_per_element[case.name] = case.bytes / elements
    assert bytes_per_element["AdamW, O3"] == pytest.approx(1 + 2 * (1 + 2 + 2) + 1)
    assert bytes_per_element["Collage, collage-plus"] == pytest.approx(2 + 2 * (2 + 4 + 4))


@pytest.mark.parametrize("group", ["elementwise", "grouped", "gradients"])
def test_every_case_runs(group):
    sizes = {"elementwise": (64, 128), "grouped": (8, 48), "gradients": (32,)}[group]
    for case in getattr(bench_kernels, group)(*sizes, "cpu"):
        case.run()
        assert case.bytes > 0


def test_a_just_in_time_cast_by_maxima_is_the_same_cast():
    cases = {case.name: case for case in bench_kernels.just_in_time(8, 16, "cpu")}
    for name in ("just-in-time cast, 16 wide", "norm backward, just-in-time cast, 64 wide"):
        case, by_maxima = cases[name], cases[name.replace("cast,", "cast by maxima,")]
        assert case.bytes > by_maxima.bytes
        got, want = by_maxima.run(), case.run()
        assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(got[:2], want[:2], strict=True))
        assert got[2].equal(want[2])


@pytest.mark.gpu
def test_a_table_of_small_kernels(tmp_path):
    file = tmp_path / "kernels.csv"
    small = "--tokens 2048 --hidden 256 --repeats 3 --only elementwise grouped just-in-time gradients update attention --commit abc"
    assert bench_kernels.main([*small.split(), "--csv", str(file)]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {"cast", "norm", "GELU", "attention backward, flash", "Collage, collage-plus"} <= {row["kernel"] for row in table}
    assert all(float(row["us"]) > 0 and float(row["share"]) > 0 for row in table)
