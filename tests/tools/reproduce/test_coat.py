"""COAT's entries that need no training."""

from pathlib import Path

import pytest

from tools.reproduce import coat
from tools.reproduce.entry import Task


def test_the_share_of_norms_and_swiglu_by_hand():
    """Llama-7B here has a feed-forward of 4 x 4,096: bytes a token of two norms' inputs, fc1's output and SwiGLU's two factors."""
    found = {finding.quantity: finding.ours for finding in coat.share(Task("toy", "whole", Path("text"), Path("folder")))}
    kept = 2 * (2 * 4096 + 2 * 16384) + 2 * 2 * 16384
    assert 0.5 < kept / (kept / (found["7b, activations kept as compute: norms and SwiGLU"] / 100)) < 0.6
    assert found["7b, activations kept as coat: norms and SwiGLU"] < 30


def test_kept_rows_of_memory_name_their_gpu():
    found = {finding.quantity: finding for finding in coat.memory(Task("kept", "whole", Path("text"), Path("folder")))}
    less = found["coat, micro-batch 4: times less memory"]
    assert less.paper == 1.54
    assert less.where["gpu"] == "NVIDIA H200"
    rows = [row for row in coat.read(coat.MEMORY) if row["micro_batch"] == "4"]
    peak = {row["case"]: float(row["peak_gib"]) for row in rows}
    assert less.ours == pytest.approx(peak["bf16"] / peak["coat"], abs=0.01)
