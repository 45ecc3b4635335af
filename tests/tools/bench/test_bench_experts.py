"""Layers of experts: ours, torch's and torchao's compute the same."""

import csv

import pytest
import torch

from helpers.definitions import grouped_mm
from msamp.numerics.metrics import sqnr_db
from tools.bench import bench_experts
from tools.bench.bench_experts import BF16_ALIGNMENT, FP8_ALIGNMENT, Experts, Shape, torch_bf16, torchao_fp8


def small_experts() -> Experts:
    return Experts(Shape("small", 8, 2, 64, 48, 200), "cpu")


def test_both_layers_compute_the_same(monkeypatch):
    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    experts = small_experts()
    fp8, bf16 = (experts.both_ways(layer)() for layer in (experts.fp8, experts.plain(BF16_ALIGNMENT, torch_bf16)))
    for got, want in zip(fp8, bf16, strict=True):
        assert sqnr_db(want.float(), got.float()) > 18
    assert [name for name, _ in experts.cases()][:3] == ["FP8, forward", "FP8, forward and backward", "FP8, casts of the weights"]


def test_the_plain_layer_pads_every_group_as_torchao_requires():
    ends = []

    def noted(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends.extend(offsets.tolist())
        return grouped_mm(a, b, offsets)

    experts = small_experts()
    want, got = (experts.both_ways(experts.plain(*how))() for how in ((BF16_ALIGNMENT, grouped_mm), (FP8_ALIGNMENT, noted)))
    assert all(end % 16 == 0 for end in ends)
    for a, b in zip(got, want, strict=True):
        assert sqnr_db(b.float(), a.float()) > 40


@pytest.mark.gpu
def test_torchao_computes_the_same():
    pytest.importorskip("torchao")
    experts = Experts(Shape("small", 8, 2, 512, 256, 4096))
    layers = experts.plain(BF16_ALIGNMENT, torch_bf16), experts.plain(FP8_ALIGNMENT, torchao_fp8())
    want, got = (experts.both_ways(layer)() for layer in layers)
    for a, b in zip(got, want, strict=True):
        assert sqnr_db(b.float(), a.float()) > 18


@pytest.mark.gpu
def test_a_table_of_one_model(tmp_path):
    file = tmp_path / "rows.csv"
    assert bench_experts.main(["--models", "olmoe", "--repeats", "2", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        assert not [row for row in csv.DictReader(stream) if row["error"] and not row["case"].startswith("torch")]
