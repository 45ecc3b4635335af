"""Rates between and outside their sizes and on another GPU, and the links of a cluster."""

import dataclasses
import math

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.planning.rates import GPUS, Cluster, MeasuredRate, Rates, rates_of


def some(*values: tuple[str, float | None, float, str], gpu: str = "h200") -> Rates:
    rows = tuple(MeasuredRate("NVIDIA H200", name, at, value, unit, "a file", "0123456") for name, at, value, unit in values)
    return Rates(GPUS[gpu], rows, gpu != "h200")


def test_between_two_sizes_a_rate_goes_with_the_logarithm_and_outside_it_stays():
    rates = some(("gemm", 1024, 1000.0, "TFLOP/s"), ("gemm", 4096, 1400.0, "TFLOP/s"))
    assert rates("gemm", 1024) == 1e15
    assert rates("gemm", 2048) == pytest.approx(1.2e15)
    assert rates("gemm", 1024 * 2**0.5) == pytest.approx(1.1e15)
    assert [rates("gemm", 16), rates("gemm", 10**6)] == [1e15, 1.4e15]


def test_another_gpu_has_the_quotients_of_the_data_sheets():
    rows = (("gemm", None, 1000.0, "TFLOP/s"), ("norm", None, 6.0, "ps"), ("update", None, 3.0, "TB/s"), ("link", None, 320.0, "GB/s"))
    h200, h100 = some(*rows), some(*rows, gpu="h100")
    assert h100("gemm") == h200("gemm")  # the same chip
    assert h100("norm") / h200("norm") == pytest.approx(4.8 / 3.35)
    assert h100("update") / h200("update") == pytest.approx(3.35 / 4.8)
    assert h100("link") == h200("link")
    half = Rates(dataclasses.replace(GPUS["h200"], peaks=(494.5, 989.5)), h200.rows, True)
    assert half("gemm") == pytest.approx(h200("gemm") / 2)


def test_the_file_has_rows_of_the_h200_and_says_that_others_are_scaled():
    h200, h100 = rates_of("h200"), rates_of("h100")
    assert not h200.scaled
    assert h100.scaled
    assert "none on NVIDIA H100" in h100.note
    assert "none on" not in h200.note
    assert all("links between hosts: not measured" in rates.note for rates in (h200, h100))
    assert all(row.source and row.commit and math.isfinite(row.value) and row.value > 0 for row in h200.rows)


def machines(gpus: int) -> Cluster:
    return Cluster(gpus=gpus, per_host=8, link=100.0, network=10.0, latency=0.0)


def config(tp: int, pp: int = 1):
    return parse_args(["--preset", "1.3b", "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)])


def test_an_exchange_goes_to_each_peer_over_its_link():
    assert machines(1).exchange_seconds(600.0, config(1)) == 0
    assert machines(8).exchange_seconds(700.0, config(1)) == pytest.approx(7.0)  # 100 bytes to each of 7
    assert machines(16).exchange_seconds(1500.0, config(1)) == pytest.approx(7.0 + 80.0)  # 7 near, 8 far
    assert machines(32).exchange_seconds(300.0, config(8)) == pytest.approx(30.0)


def test_stages_cross_hosts_where_one_fills_a_host():
    assert not machines(8).crosses_hosts(config(2, 4))
    assert machines(32).crosses_hosts(config(8, 4))
    assert not machines(16).crosses_hosts(config(1, 8))
