"""A run of 100,000 iterations that saves, evaluates, records and is killed twice: memory, open files and bits stay as they were."""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.lm.checkpoint import iteration_folder
from megatron.lm.checkpoint.files.folder import marked_iteration
from tools import soak

ITERATIONS = int(os.environ.get("LONG_LIFE_ITERATIONS", "100_000"))
KILLS, COMPARED, WARM = (2_000, 5_000), 6_000, 0.1  # iterations; what is left of the run's memory at the start
EACH = 500  # iterations between checkpoints
SLOPE = 0.1  # KB per iteration
FLAGS = (
    f"--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 "
    f"--train-iters {ITERATIONS} --lr 5e-3 --lr-warmup-iters 2 --tokenizer-type NullTokenizer --vocab-size {soak.VOCABULARY} --split 8,1,1 "
    f"--num-workers 0 --save-interval {EACH} --keep-last 2 --eval-interval {EACH} --eval-iters 2 --record-interval 100 --opt-level O2"
)


def start(folder: Path, data: Path, *more: object):
    files = [
        "--metrics-file",
        folder / "metrics",
        "--record-precision",
        folder / "record",
        "--save",
        folder / "save",
        "--load",
        folder / "save",
    ]
    line = [sys.executable, "-m", "megatron.lm.pretrain", *FLAGS.split(), "--data-path", data, *files, *more]
    folder.mkdir(exist_ok=True)
    return soak.start([str(word) for word in line], folder / f"log{time.monotonic_ns()}")


def iteration(folder: Path) -> int:
    """The last one that the newest log has."""
    log = max(folder.glob("log*"), key=lambda path: path.stat().st_mtime_ns).read_text(errors="replace")
    return int((re.findall(r"iter +(\d+)/", log) or [0])[-1])


def slope(samples: list[tuple[int, int, int]]) -> float:
    """Least squares through (iteration, bytes), in KB per iteration."""
    x, y, _ = (sum(values) / len(samples) for values in zip(*samples, strict=True))
    return sum((a - x) * (b - y) for a, b, _ in samples) / sum((a - x) ** 2 for a, *_ in samples) / 1e3


@pytest.mark.nightly(2700)
@pytest.mark.timeout(4 * 3600)
def test_memory_and_open_files_stay_and_checkpoints_keep_their_bits(tmp_path: Path, request: pytest.FixtureRequest):
    data = soak.write_data(tmp_path)
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    assert start(undisturbed, data, "--exit-interval", COMPARED).wait() == 0
    for kill in KILLS:
        process = start(run, data)
        while iteration(run) < kill:
            assert process.poll() is None
            time.sleep(0.2)
        soak.kill(process)
    process = start(run, data)
    request.addfinalizer(lambda: soak.kill(process))
    while (marked_iteration(run / "save") or 0) < COMPARED:
        assert process.poll() is None
        time.sleep(0.2)
    assert soak.differences(iteration_folder(undisturbed / "save", COMPARED), iteration_folder(run / "save", COMPARED)) == []
    samples, handle = [], psutil.Process(process.pid)
    with contextlib.suppress(psutil.Error):  # it may end between two lines
        while process.poll() is None:
            info = handle.memory_info()  # without the pages of the mapped index of the data, which it walks through
            samples.append((iteration(run), info.rss - info.shared, handle.num_fds()))
            time.sleep(2)
    assert process.wait() == 0
    assert marked_iteration(run / "save") == ITERATIONS
    steady = [sample for sample in samples if COMPARED + WARM * ITERATIONS < sample[0] < ITERATIONS]
    files = sorted(sample[2] for sample in steady)
    print(f"{ITERATIONS} iterations: {slope(steady):.3f} KB each, from {steady[0]} to {steady[-1]}")
    assert slope(steady) < SLOPE
    assert files[len(files) // 20] == files[-len(files) // 20 - 1]  # but for the moments of a save
