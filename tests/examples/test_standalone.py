"""The standalone examples, as their first lines say to start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("example", ["data_parallel", "greedy_zero"])
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
