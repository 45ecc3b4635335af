import csv

import pytest
import torch

from msamp.kernels.reference.adamw import Batch
from tools.bench import bench_kernels
from tools.bench.bench_kernels import Case


def measure(monkeypatch: pytest.MonkeyPatch, case: Case) -> dict:
    """Of launches that take 1, 2 and 3 microseconds, beside ceilings of 4 TB/s and 800 TFLOP/s."""
    monkeypatch.setattr(bench_kernels, "times", lambda run, repeats: [repeats * 1e-6, 2e-6, 1e-6])
    return bench_kernels.measure(case, 3, 4e12, 800e12)


def test_a_row_of_a_kernel_that_moves_bytes(monkeypatch):
    row = measure(monkeypatch, Case("cast", lambda: None, bytes=6e6))
    assert row == {"kernel": "cast", "us_p20": 1.4, "us": 2.0, "us_p80": 2.6, "tb_s": 3.0, "tflops": "", "share": 0.75}


def test_a_row_of_a_kernel_that_multiplies(monkeypatch):
    row = measure(monkeypatch, Case("GEMM", lambda: None, flops=4e8))
    assert (row["tb_s"], row["tflops"], row["share"]) == ("", 200, 0.25)


ELEMENTS = 4 * 12 * 32 * 32
COAT = 2 * 8 * 4 * (3 * 32 + 32 + 4 * 32 + 32) / ELEMENTS  # a row of 32 or 128 has one group, a maximum and an exponent, there and back
UPDATES = {
    "AdamW, bf16": 4 + 2 * (4 + 4 + 4) + 2,
    "AdamW with COAT's moments, bf16": 4 + 2 * (1 + 1 + 4) + 2 + 2 * COAT,
    "AdamW, O2": 1 + 2 * (1 + 2 + 2),
    "AdamW with COAT's moments, O2": 1 + 2 * (1 + 1 + 2) + 2 * COAT,
    "AdamW, O3": 1 + 2 * (1 + 2 + 2) + 1,
    "AdamW with COAT's moments, O3": 1 + 2 * (1 + 1 + 2) + 1 + 2 * COAT,
    "Collage, bf16-a": 2 + 2 * (2 + 2 + 2),
    "Collage, bf16-kahan": 2 + 2 * (2 + 2 + 4),
    "Collage, collage-light": 2 + 2 * (2 + 2 + 4),
    "Collage, collage-plus": 2 + 2 * (2 + 4 + 4),
}


def test_updates_run_and_move_their_tensors():
    found = {}
    for case in bench_kernels.update(32, "cpu"):
        batch = next(x for x in case.run.args if isinstance(x, Batch))
        before = [step.item() for step in batch.steps]
        case.run()
        assert [step.item() for step in batch.steps] == [step + 1 for step in before]
        found[case.name] = case.bytes / ELEMENTS
    assert {name: found[name] for name in UPDATES} == pytest.approx(UPDATES)


def test_what_is_asked_of_gradients():
    torch.manual_seed(0)
    found = {case.name: (case.run(), case.bytes / ELEMENTS) for case in bench_kernels.gradients(32, "cpu")}
    assert [size for _, size in found.values()] == [2, 2, 1, 2 * 4 * 3 * 16 / ELEMENTS, 3]
    (stats, sums), _ = found["norms of BF16 gradients"]
    assert stats[0].min() > 2.5
    exact = (sums[:, 0] + sums[:, 1] * 2.0**-30) / 2**20 * 2**6
    assert exact.sum() == pytest.approx(ELEMENTS, rel=0.05)


def test_every_elementwise_case_runs():
    cases = {case.name: (case.run(), case.bytes) for case in bench_kernels.elementwise(64, 128, "cpu")}
    assert len(cases) == 16
    assert cases["column sums of a layer, added up"][1] == (4 + 2) * 9 * 128
    assert cases["cast"][1] == 3 * 64 * 128


def test_a_just_in_time_cast_by_maxima_is_the_same_cast():
    cases = {case.name: case for case in bench_kernels.just_in_time(8, 16, "cpu")}
    for width in (16, 64):
        alone, pair = f"just-in-time cast, {width} wide", f"norm backward, just-in-time cast, {width} wide"
        for name in (alone, pair):
            case, by_maxima = cases[name], cases[name.replace("cast,", "cast by maxima,")]
            assert case.bytes - by_maxima.bytes == 2 * 8 * width
            got, want = by_maxima.run(), case.run()
            assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(got[:2], want[:2], strict=True))
            assert got[2].equal(want[2])
    assert len(cases) == 12


def test_groups_are_cast_and_come_back():
    cast, back = bench_kernels.grouped(8, 48, "cpu")
    payload, exponents = cast.run()
    assert (payload.shape, exponents.shape, back.run().shape) == ((8, 48), (8, 3), (8, 48))
    assert cast.bytes == back.bytes == 8 * 48 * (2 + 1) + 8 * 3


@pytest.mark.gpu
def test_a_table_of_small_kernels(tmp_path):
    file = tmp_path / "kernels.csv"
    small = [
        "--tokens",
        "2048",
        "--hidden",
        "256",
        "--repeats",
        "3",
        "--only",
        "elementwise",
        "grouped",
        "just-in-time",
        "gradients",
        "update",
        "attention",
    ]
    assert bench_kernels.main([*small, "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    named = {
        "cast",
        "norm",
        "GELU",
        "rotary embedding, in place",
        "attention backward, flash",
        "cast, groups of 16",
        "Collage, collage-plus",
    }
    assert named <= {row["kernel"] for row in table}
    assert all(float(row["us"]) > 0 and float(row["share"]) > 0 for row in table)
