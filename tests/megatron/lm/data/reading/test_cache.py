"""Cached arrays: written once, read by all, and made anew whatever a kill, a disk or another job has left."""

import fcntl
import json
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest

from helpers.kills import killed_at_a_rename
from megatron.lm.data.reading.cache import LOCK_FILE, _entry, kept

NAMES = ("places", "draws")
MADE = (np.arange(600, dtype=np.int32), np.arange(1000, dtype=np.int64).reshape(500, 2))


def take(folder, *, writes=True, made=None):
    """The arrays, and how often they had to be made."""
    calls = []

    def make():
        calls.append(1)
        return made or MADE

    found = kept(folder, "x", NAMES, make, writes=writes)
    assert all(np.array_equal(array, wanted) and array.dtype == wanted.dtype for array, wanted in zip(found, made or MADE, strict=True))
    return found, len(calls)


def test_made_once_then_mapped(tmp_path, capsys):
    assert take(tmp_path)[1] == 1
    found, calls = take(tmp_path, writes=False)
    assert calls == 0
    assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "x-draws.npy", "x-places.npy", "x.json"]
    assert capsys.readouterr().out == ""


def zeroed(file):
    file.write_bytes(bytes(file.stat().st_size))


def torn(file):
    file.write_bytes(file.read_bytes()[:100])


def with_other_values(file):
    with file.open("wb") as stream:
        np.save(stream, MADE[0][::-1])


@pytest.mark.promise("Data", "A torn, zeroed or otherwise invalid index cache is rebuilt, and the log says so.")
@pytest.mark.parametrize(
    ("name", "damage"),
    [("x-places.npy", zeroed), ("x-draws.npy", torn), ("x-places.npy", with_other_values), ("x-draws.npy", Path.unlink), ("x.json", torn)],
)
def test_what_does_not_fit_is_made_anew(tmp_path, capsys, name, damage):
    take(tmp_path)
    damage(tmp_path / name)
    assert take(tmp_path)[1] == 1
    said = capsys.readouterr().out
    assert ("is rebuilt" in said) == ((tmp_path / name).suffix == ".npy" or damage is not Path.unlink)
    assert take(tmp_path)[1] == 0


@pytest.mark.promise("Data", "No file of an index cache can run code.")
def test_no_pickle_is_run(tmp_path):
    class Canary:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    take(tmp_path)
    entries = json.loads((tmp_path / "x.json").read_text())
    for damaged in (pickle.dumps(Canary()), None):
        file = tmp_path / "x-places.npy"
        if damaged is None:
            np.save(file, np.array([Canary()], dtype=object), allow_pickle=True)
        else:
            file.write_bytes(damaged)
        # Under digests of its own, as a stranger would leave it.
        (tmp_path / "x.json").write_text(json.dumps(entries | {"places": _entry(file)}))
        assert take(tmp_path)[1] == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{}", '{"places": 3, "draws": 4}', "null"])
def test_a_list_that_is_none(tmp_path, text):
    take(tmp_path)
    (tmp_path / "x.json").write_text(text)
    assert take(tmp_path)[1] == 1


@pytest.mark.promise("Data", "A full disk costs the cache, not the run.")
def test_a_full_disk_costs_the_cache_alone(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert take(tmp_path)[1] == 1
    assert "cannot be written ([Errno 28] No space left on device): every process builds it in its own memory" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    assert take(tmp_path, writes=False)[1] == 1


def hold(folder, done):
    """Runs in another process, which writes at the same time."""
    with (Path(folder) / LOCK_FILE).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        Path(done).touch()
        signal.pause()


def test_two_jobs_do_not_write_into_each_other(tmp_path, capsys):
    child = os.fork()
    if not child:
        try:
            hold(tmp_path, tmp_path / "held")
        finally:
            os._exit(1)
    try:
        while not (tmp_path / "held").exists():
            pass
        assert take(tmp_path)[1] == 1
        assert "cannot be written" in capsys.readouterr().out
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert take(tmp_path)[1] == 1
    assert take(tmp_path)[1] == 0


@pytest.mark.promise("Data", "A kill while index caches are written costs only rebuilding them.")
@pytest.mark.parametrize("written", [1, 3])
def test_a_kill_while_it_is_written(tmp_path, written):
    """SIGKILL when so many of the three files have their names: the next start makes what is missing."""
    killed_at_a_rename(written, lambda: kept(tmp_path, "x", NAMES, lambda: MADE, writes=True))
    assert take(tmp_path)[1] == (written < 3)
    assert take(tmp_path)[1] == 0
