import csv

import pytest
import torch

from msamp.numerics.metrics import sqnr_db
from tools.bench import bench_experts
from tools.bench.bench_experts import TOP_K, Experts
from tools.bench.bench_grouped import MODELS, Layer


def plain(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM, which a CPU may not have."""
    ends = offs.tolist()
    parts = [a[start:end] @ b[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


def test_both_layers_compute_the_same(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", plain)
    experts = Experts(Layer("small", "fc1", 8, 400, 64, 96), Layer("small", "fc2", 8, 400, 48, 64), 2, "cpu")
    fp8, bf16 = (experts.both_ways(layer)() for layer in (experts.fp8, experts.bf16))
    assert len(fp8) == 4
    for got, want in zip(fp8, bf16, strict=True):
        assert sqnr_db(want.float(), got.float()) > 18
    assert [name for name, _ in experts.cases()][:3] == ["FP8, forward", "FP8, forward and backward", "FP8, casts of the weights"]


def test_a_case_that_fails_is_a_row(monkeypatch):
    def fails():
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench_experts, "Experts", lambda *args: type("", (), {"cases": lambda self: [("FP8, forward", fails)]})())
    monkeypatch.setattr(bench_experts, "peak", lambda run: run())
    (row,) = bench_experts.measure("olmoe", 3)
    assert (row["case"], row["us"], row["error"]) == ("FP8, forward", "", "RuntimeError: no memory")


def test_rows_are_whole_tokens():
    for name, top_k in TOP_K.items():
        assert MODELS[name][0].rows % top_k == 0


@pytest.mark.gpu
def test_a_table_of_one_model(tmp_path):
    file = tmp_path / "experts.csv"
    assert bench_experts.main(["--models", "olmoe", "--repeats", "2", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        assert not [row for row in csv.DictReader(stream) if row["error"]]
