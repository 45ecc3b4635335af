"""The standalone examples, as their first lines say to start them."""

import os
import re
import runpy
import subprocess
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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("example", "processes"),
    [
        pytest.param("plain_loop_torchrun", 2, marks=pytest.mark.nightly(6)),
        pytest.param("greedy_zero", 2, marks=pytest.mark.nightly(6)),
        pytest.param("greedy_zero", 1, marks=pytest.mark.nightly),
    ],
)
def test_it_learns_and_the_ranks_agree(example, processes):
    path = ROOT / "examples" / f"{example}.py"
    assert path.read_text().count("\n") <= 45
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, *(TORCHRUN if processes > 1 else ()), str(path)]
    done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr  # each asserts at its end that the ranks' weights are equal
    lines = re.findall(r"loss (\S+)  bytes sent (\d+)", done.stdout)
    losses, sent = [float(loss) for loss, _ in lines], [int(count) for _, count in lines]
    assert losses[-1] < 0.25 * losses[0]
    assert (sent[-1] > sent[0] > 0) == (processes > 1)
    stored = [int(count) for count in re.findall(r"stores (\d+) bytes", done.stdout)]
    if example == "plain_loop_torchrun":
        in_bf16 = [int(count) for count in re.findall(r"averaged in BF16 \S+, (\d+)", done.stdout)]
        assert sent[-1] < 0.55 * in_bf16[-1]
    if example == "greedy_zero":
        assert len(stored) == processes
        assert max(stored) < 1.1 * min(stored)


@pytest.mark.parametrize(
    "example",
    ["plain_loop", "plain_loop_torchrun", "greedy_zero", "hugging_face", "coat", "fp16_amp", "convolution"],
)
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
