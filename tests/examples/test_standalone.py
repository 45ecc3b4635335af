"""The standalone examples, as their first lines say to start them."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CONTRAST = {
    "plain_loop": r"loss \S+  in FP32 \d\S*\n[\s\S]*weights and optimizer states: \d+ bytes, in FP32 \d+",
    "plain_loop_torchrun": r"averaged in BF16 \d\S*, 0",
    "greedy_zero": r"stores \d+ bytes of optimizer states, .* AdamW without ZeRO stores \d+",
    "hugging_face": r"loss \S+  in FP32 \d",
    "coat": r"loss \S+  in FP32 \d\S*\n[\s\S]*moments: \d+ bytes, in FP32 \d+; saved for backward: \d+ bytes, in FP32 \d+",
    "fp16_amp": r"in FP32 \d\S*  zero without the scale [1-9]",
    "convolution": r"loss \S+  in FP32 \d",
}


@pytest.mark.parametrize("example", ["plain_loop", "plain_loop_torchrun", "greedy_zero", "hugging_face", "coat", "fp16_amp", "convolution"])
def test_it_learns_on_one_process(example, tmp_path, monkeypatch, capsys):
    if example == "hugging_face":
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{example}.py"
    assert path.read_text(encoding="utf-8").count("\n") <= 45
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path)])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\S*)", printed)]
    assert losses[-1] < 0.3 * losses[0]
    assert re.search(CONTRAST[example], printed), "what it would be without, in the same units"


def test_collage_keeps_what_bf16_loses(capsys):
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples/collage.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\S*)", printed)]
    assert losses[-1] < 0.3 * losses[0]
    lost = re.findall(r"lost (\S+) %    in BF16 alone \S+ (\S+) %", printed)
    assert all(float(kept) < 1 and float(alone) > 10 for kept, alone in lost)
    assert float(lost[-1][1]) > 40
