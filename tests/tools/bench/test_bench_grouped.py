import csv
import importlib.util

import pytest
import torch

from tools.bench import bench_grouped
from tools.bench.bench_grouped import LOADS, MODELS, PRODUCTS, Layer, Operands, counts

SMALL = Layer("small", "fc1", 12, 1000, 64, 96)


@pytest.mark.parametrize("load", LOADS)
def test_loads_share_out_all_rows(load):
    for layer in (SMALL, *(layer for both in MODELS.values() for layer in both)):
        sizes = counts(layer, load)
        assert (len(sizes), sum(sizes)) == (layer.experts, layer.rows)
        assert min(sizes) == 0 or load == "balanced"
        assert max(sizes) - min(sizes) <= 1 or load != "balanced"


def test_the_layers_are_those_of_the_models():
    assert MODELS["qwen3"][1] == Layer("Qwen3-30B-A3B", "fc2", 128, 65536, 768, 2048)
    assert MODELS["mixtral"][0].flops == 2.0 * 16384 * 4096 * 28672


@pytest.mark.parametrize("load", LOADS)
def test_our_operands_are_torch_s_with_padding(load):
    operands = Operands(SMALL, load, "cpu")
    start = first = 0
    for size, end in zip(operands.sizes, operands.padded.tolist(), strict=True):
        assert operands.x8[first : first + size].float().equal(operands.x[start : start + size].to(bench_grouped.E4M3).float())
        assert not operands.x8[first + size : end].float().any()
        start, first = start + size, end
    assert first <= operands.capacity


def test_our_products_run_and_are_right(capsys):
    operands = Operands(SMALL, "ragged", "cpu")
    shapes = {(product, run().shape) for _, product, run in operands.own_cases()}
    rows = operands.capacity
    assert shapes == {("forward", (rows, 96)), ("grad_input", (rows, 64)), ("grad_weight", (12, 96, 64))}
    bench_grouped.check("cpu", columns=(64, 96))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(PRODUCTS)
    assert min(float(line.split("SQNR ")[1].split()[0]) for line in lines) > 120


def test_a_kernel_that_fails_is_a_row(monkeypatch):
    def fails():
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(bench_grouped, "timed", lambda run, repeats: (run(), (1.0, 2.0, 3.0))[1])
    monkeypatch.setattr(
        bench_grouped,
        "Operands",
        lambda layer, load: type("", (), {"cases": lambda self, chosen: [("torch BF16", "forward", int), ("ours", "forward", fails)]})(),
    )
    good, bad = bench_grouped.measure(SMALL, "balanced", 3)
    assert (good["us"], good["over_bf16"], good["error"]) == (2.0, 1.0, "")
    assert (bad["us"], bad["error"]) == ("", "RuntimeError: no kernel")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_tilings_are_different_and_fit_the_shared_memory():
    for product, fast in (("forward", True), ("grad_input", False), ("grad_weight", False)):
        found = bench_grouped.tilings(product, fast)
        assert len(set(found)) == len(found)
        for t in found:
            assert (t.block_m + t.block_n) * t.block_k * t.stages * t.programs <= 227 * 1024


def test_a_sweep_takes_the_fastest_by_product_and_length(monkeypatch, capsys):
    pytest.importorskip("triton")
    layers = [SMALL, SMALL._replace(name="long", inputs=2048)]
    monkeypatch.setattr(bench_grouped, "tilings", lambda product, fast: ["fails", "quick", "slow"])
    monkeypatch.setattr(bench_grouped, "Operands", lambda layer, load: type("", (), {"layer": layer, "ours": lambda *a: torch.ones(2)})())

    def tiled(kernels, operands, product, fast, tiling):
        def run():
            if tiling == "fails":
                raise RuntimeError("no")
            return torch.ones(2)

        run.us = {"quick": 1.0, "slow": 2.0, "fails": 0.0}[tiling] * (-1 if operands.layer.name == "long" else 1) + 3
        return run

    monkeypatch.setattr(bench_grouped, "tiled", tiled)
    monkeypatch.setattr(bench_grouped, "timed", lambda run, repeats: (0.0, run.us, 9.0))
    chosen = bench_grouped.sweep(layers, 100, 3)
    assert (chosen["forward", True], chosen["forward", False]) == ("quick", "slow")
    assert "forward fast f a i l s: RuntimeError: no" in capsys.readouterr().out
    assert bench_grouped.sweep(layers, -1, 3) == {}


@pytest.mark.gpu
def test_a_table_of_one_model(tmp_path):
    file = tmp_path / "grouped.csv"
    assert bench_grouped.main(["--models", "olmoe", "--loads", "balanced", "--repeats", "2", "--csv", str(file), "--commit", "abc"]) == 0
    with file.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert {row["kernel"] for row in table} >= {"torch BF16", "dense FP8", "ours fast", "ours full"}
    assert not [row["error"] for row in table if row["kernel"].startswith("ours") and row["error"]]
    assert torch.cuda.get_device_name() == table[0]["gpu"]
