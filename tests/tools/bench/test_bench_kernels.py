import csv

import pytest
import torch

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--repeats", "1"], "--repeats 1: give at least 2"), (["--only", "sort"], "invalid choice: 'sort'"), ([], "there is no GPU here")],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_kernels.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_a_table_of_small_kernels(tmp_path):
    file = tmp_path / "kernels.csv"
    small = ["--tokens", "2048", "--hidden", "256", "--repeats", "3", "--only", "elementwise", "attention"]
    assert bench_kernels.main([*small, "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {"norm", "GELU", "rotary embedding, in place", "attention backward, flash"} <= {row["kernel"] for row in table}
    assert all(float(row["us"]) > 0 and float(row["share"]) > 0 for row in table)
