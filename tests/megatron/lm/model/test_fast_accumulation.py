"""--fp8-fast-accumulation in whole runs: which products it reaches, and that the loss stays."""

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from msamp.kernels import ops


def sums_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[bool], list[float]]:
    """How each FP8 product of a run was to be added up, and the losses."""
    told: list[bool] = []
    real = ops.scaled_mm
    with monkeypatch.context() as patched:
        patched.setattr(ops, "scaled_mm", lambda *a, fast_accum: (told.append(fast_accum), real(*a, fast_accum=fast_accum))[1])
        losses = tiny.losses(tiny.run(tiny.config(tiny.write_data(tmp_path), train_iters=3, **settings)))
    return told, losses


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
def test_every_product_of_a_linear_layer_is_fast(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full, losses = sums_of(tmp_path, monkeypatch, precision=level)
    fast, same = sums_of(tmp_path, monkeypatch, precision=level, fp8_fast_accumulation="all")
    assert len(full) == len(fast) > 0
    assert full.count(True) < full.count(False)
    assert all(fast)
    assert same == losses  # a CPU adds up in full


def test_no_product_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told, _ = sums_of(tmp_path, monkeypatch, precision="O3", fp8_fast_accumulation="none", output_layer_precision="fp8-all")
    assert len(told) > 0
    assert not any(told)


def test_the_head_s_products_are_added_up_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told, _ = sums_of(tmp_path, monkeypatch, precision="O3", fp8_fast_accumulation="all", output_layer_precision="fp8-all")
    assert 0 < told.count(False) < told.count(True)
