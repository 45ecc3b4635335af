"""Products and layers of experts: ours, torch's and torchao's compute the same; a case that fails is a row."""

import csv

import pytest
import torch

from helpers.definitions import grouped_mm
from msamp.numerics.metrics import sqnr_db
from tools.bench import bench_experts, bench_grouped
from tools.bench.bench_experts import BF16_ALIGNMENT, FP8_ALIGNMENT, Experts, torch_bf16, torchao_fp8
from tools.bench.bench_grouped import LOADS, MODELS, Layer, Operands, counts

SMALL = Layer("small", "fc1", 12, 1000, 64, 96)


def small_experts() -> Experts:
    return Experts(Layer("small", "fc1", 8, 400, 64, 96), Layer("small", "fc2", 8, 400, 48, 64), 2, "cpu")


@pytest.mark.parametrize("load", LOADS)
def test_our_operands_have_all_rows_of_a_load_in_padded_groups(load):
    for layer in (SMALL, *(layer for both in MODELS.values() for layer in both)):
        assert (len(counts(layer, load)), sum(counts(layer, load))) == (layer.experts, layer.rows)
    operands = Operands(SMALL, load, "cpu")
    start = first = 0
    for size, end in zip(operands.sizes, operands.padded.tolist(), strict=True):
        assert operands.x8[first : first + size].float().equal(operands.x[start : start + size].to(bench_grouped.E4M3).float())
        assert not operands.x8[first + size : end].float().any()
        start, first = start + size, end
    shapes = {(product, run().shape) for _, product, run in operands.own_cases()}
    rows = operands.capacity
    assert shapes == {("forward", (rows, 96)), ("grad_input", (rows, 64)), ("grad_weight", (12, 96, 64))}


def fails():
    raise RuntimeError("no kernel\nfor this")


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
    experts = Experts(Layer("small", "fc1", 8, 8192, 512, 512), Layer("small", "fc2", 8, 8192, 256, 512), 2)
    layers = experts.plain(BF16_ALIGNMENT, torch_bf16), experts.plain(FP8_ALIGNMENT, torchao_fp8())
    want, got = (experts.both_ways(layer)() for layer in layers)
    for a, b in zip(got, want, strict=True):
        assert sqnr_db(b.float(), a.float()) > 18


@pytest.mark.gpu
@pytest.mark.parametrize("program", [bench_experts, bench_grouped])
def test_a_table_of_one_model(program, tmp_path):
    file = tmp_path / "rows.csv"
    assert program.main(["--models", "olmoe", "--repeats", "2", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        assert not [row for row in csv.DictReader(stream) if row["error"] and not row.get("kernel", "").startswith("torch")]
