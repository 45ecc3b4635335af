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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("example", "processes"),
    [
        pytest.param("greedy_zero", 2, marks=pytest.mark.nightly(6)),
        pytest.param("data_parallel", 1, marks=pytest.mark.nightly(4)),
        pytest.param("data_parallel", 2, marks=pytest.mark.nightly),
        pytest.param("greedy_zero", 1, marks=pytest.mark.nightly),
    ],
)
def test_it_learns_and_the_ranks_agree(example, processes):
    path = ROOT / "examples" / f"{example}.py"
    assert path.read_text().count("\n") <= 40
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, *(TORCHRUN if processes > 1 else ()), str(path)]
    done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr  # each asserts at its end that the ranks' weights are equal
    lines = re.findall(r"loss (\S+)  bytes sent (\d+)", done.stdout)
    losses, sent = [float(loss) for loss, _ in lines], [int(count) for _, count in lines]
    assert losses[-1] < 0.25 * losses[0]
    assert (sent[-1] > sent[0] > 0) == (processes > 1)
    stored = [int(count) for count in re.findall(r"keeps (\d+) bytes", done.stdout)]
    if example == "greedy_zero":
        assert len(stored) == processes
        assert max(stored) < 1.1 * min(stored)


@pytest.mark.parametrize(
    "example", ["plain_loop", "data_parallel", "greedy_zero", "hugging_face", "collage", "coat", "fp16_amp", "convolution"]
)
def test_it_learns_on_one_process(example, tmp_path, monkeypatch, capsys):
    if example == "hugging_face":
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{example}.py"
    assert path.read_text(encoding="utf-8").count("\n") <= 45
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path)])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (\d\S*)", capsys.readouterr().out)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_readme_of_the_examples_lists_every_one():
    folder = ROOT / "examples"
    named = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert all((folder / name).exists() for name in named)
    listed = {name.split("/")[0] for name in named}
    there = {path.name for path in folder.iterdir() if path.suffix in (".py", ".sh") or path.is_dir()}
    assert listed == there - {"preamble.sh", "__pycache__"}
