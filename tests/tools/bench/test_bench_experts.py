import csv

import pytest
import torch

from helpers.definitions import grouped_mm
from msamp.numerics.metrics import sqnr_db
from tools.bench import bench_experts
from tools.bench.bench_experts import BF16_ALIGNMENT, FP8_ALIGNMENT, TOP_K, Experts, torch_bf16, torchao_fp8
from tools.bench.bench_grouped import MODELS, Layer


def test_both_layers_compute_the_same(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    experts = Experts(Layer("small", "fc1", 8, 400, 64, 96), Layer("small", "fc2", 8, 400, 48, 64), 2, "cpu")
    fp8, bf16 = (experts.both_ways(layer)() for layer in (experts.fp8, experts.plain(BF16_ALIGNMENT, torch_bf16)))
    assert len(fp8) == 4
    for got, want in zip(fp8, bf16, strict=True):
        assert sqnr_db(want.float(), got.float()) > 18
    assert [name for name, _ in experts.cases()][:3] == ["FP8, forward", "FP8, forward and backward", "FP8, casts of the weights"]


def test_the_plain_layer_pads_every_group(monkeypatch):
    """As torchao's product requires, whose groups must be multiples of 16 rows."""
    ends = []

    def noted(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends.append(offsets.tolist())
        return grouped_mm(a, b, offsets)

    experts = Experts(Layer("small", "fc1", 8, 400, 64, 96), Layer("small", "fc2", 8, 400, 48, 64), 2, "cpu")
    want = experts.both_ways(experts.plain(BF16_ALIGNMENT, grouped_mm))()
    got = experts.both_ways(experts.plain(FP8_ALIGNMENT, noted))()
    assert ends[0] == ends[1]
    assert all(end % 16 == 0 for end in ends[0])
    assert ends[0][-1] >= 400
    for a, b in zip(got, want, strict=True):
        assert sqnr_db(b.float(), a.float()) > 40


@pytest.mark.parametrize("loads", [True, False])
def test_torchao_is_a_case_if_it_is_installed(loads, monkeypatch):
    """Beside some versions of Triton it is installed and does not load: then the case fails, and the others run."""

    def product():
        if not loads:
            raise ValueError("key contains names that are not kernel arguments")
        return grouped_mm

    experts = Experts(Layer("small", "fc1", 8, 400, 64, 96), Layer("small", "fc2", 8, 400, 48, 64), 2, "cpu")
    monkeypatch.setattr(bench_experts.importlib.util, "find_spec", lambda name: None)
    assert [name for name, _ in experts.cases()][-1] == "BF16, forward and backward"
    monkeypatch.setattr(bench_experts.importlib.util, "find_spec", lambda name: name == "torchao")
    monkeypatch.setattr(bench_experts, "torchao_fp8", product)
    (*_, (name, run)) = experts.cases()
    assert name == "torchao FP8, forward and backward"
    if loads:
        assert len(run()) == 4
    else:
        with pytest.raises(ValueError, match="not kernel arguments"):
            run()


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
def test_torchao_computes_the_same():
    pytest.importorskip("torchao")
    experts = Experts(Layer("small", "fc1", 8, 8192, 512, 512), Layer("small", "fc2", 8, 8192, 256, 512), 2)
    layers = experts.plain(BF16_ALIGNMENT, torch_bf16), experts.plain(FP8_ALIGNMENT, torchao_fp8())
    want, got = (experts.both_ways(layer)() for layer in layers)
    for a, b in zip(got, want, strict=True):
        assert sqnr_db(b.float(), a.float()) > 18


@pytest.mark.gpu
def test_a_table_of_one_model(tmp_path):
    file = tmp_path / "experts.csv"
    assert bench_experts.main(["--models", "olmoe", "--repeats", "2", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        assert not [row for row in csv.DictReader(stream) if row["error"]]
