"""What a run is doing, in words: from the metrics file, the time of its last write, and whether its process exists."""

import os
from pathlib import Path

import psutil
import pytest

from helpers.watched import START, end, lines, train
from megatron.lm.tools.watch.run_files import WatchedRun
from megatron.lm.tools.watch.status import STYLES, exists, status

NOW = 1e9
TWO = (train(10), train(20))


def judged(tmp_path: Path, *entries: dict, silent: float = 1.0, alive: bool = True, host: str = "node") -> tuple[str, str]:
    run = WatchedRun(name="a", metrics=lines(tmp_path / "m.jsonl", *entries))
    run.update()
    run.modified = NOW - silent
    return status(run, NOW, alive=lambda process, started: alive, host=host)


@pytest.mark.parametrize(
    ("entries", "silent", "alive", "host", "word", "text"),
    [
        ((), 1, True, "node", "not started", "not started: its metrics file has no entry yet"),
        ((START,), 1, True, "node", "starting", "starting: it has not logged a step yet"),
        ((START, *TWO), 1, True, "node", "running", "running at iteration 20 of 100, 0:02:40 left without evaluations"),
        ((START, *TWO), 99, True, "node", "running", "running at iteration 20 of 100"),  # five usual times of 20 s
        ((START, *TWO), 101, True, "node", "silent", "silent for 0:01:41 at iteration 20 of 100, usually every 0:00:20: it exists, and"),
        ((START, *TWO), 101, False, "node", "killed", "killed at iteration 20 of 100: process 4321 is gone and wrote no end, 0:01:41 ago"),
        ((START, *TWO), 101, False, "other", "silent", "hangs or was killed; only its own machine can tell"),
        ((START,), 61, False, "node", "killed", "killed at iteration 0 of 100"),
        ((START, *TWO, end(100)), 9999, False, "node", "completed", "completed at iteration 100 of 100"),
        ((START, *TWO, end(20, "stopped", "SIGTERM")), 9, False, "node", "stopped", "stopped at iteration 20 of 100: SIGTERM"),
        ((START, *TWO, end(20, "failed", "no space")), 9, False, "node", "failed", "failed at iteration 20 of 100: no space"),
        ((START, *TWO, START | {"start": 20}), 1, True, "node", "starting", "not logged a step yet, resumed at iteration 20"),
        ((START, *TWO, end(20, "stopped"), START | {"start": 20}, train(30)), 1, True, "node", "running", ", resumed at iteration 20"),
    ],
)
def test_a_state_in_words(tmp_path: Path, entries: tuple, silent: float, alive: bool, host: str, word: str, text: str) -> None:
    state = judged(tmp_path, *entries, silent=silent, alive=alive, host=host)
    assert state[0] == word
    assert text in state[1]
    assert state[1].startswith(word)
    assert word in STYLES


def test_a_file_of_an_older_version_is_not_called_killed(tmp_path: Path) -> None:
    old = {"kind": "precision", "bytes_per_parameter": {}, "parameters": 10}
    word, text = judged(tmp_path, old, *TWO, silent=9999, alive=False)
    assert word == "silent"
    assert "at iteration 20, usually every 0:00:20: it is from a version that recorded no end, so it may have completed" in text
    assert judged(tmp_path, old, train(10, step_ms=None))[1] == "running at iteration 10"


def test_a_process_exists_until_another_has_its_number() -> None:
    born = psutil.Process().create_time()
    assert exists(os.getpid(), born + 5)
    assert not exists(os.getpid(), born - 60)
    assert not exists(2**22 + 1, born)
