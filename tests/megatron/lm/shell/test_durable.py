"""Files written aside."""

import errno
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from megatron.lm.shell import durable
from megatron.lm.shell.durable import written_aside


def test_written_aside_is_whole_or_not_there(tmp_path):
    path = tmp_path / "note"
    with written_aside(path) as stream:
        stream.write(b"first")
        assert not path.exists()
    with pytest.raises(TypeError), written_aside(path) as stream:
        stream.write("no bytes")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def write_slowly(path, value, size=64, times=40):
    whole = [size * value for value in (b"a", b"b", b"c")]
    for _ in range(times):
        with written_aside(path) as stream:
            for _ in range(size):
                stream.write(value)
                stream.flush()
        assert path.read_bytes() in whole


def test_two_processes_that_write_one_path_at_once_leave_one_whole_file(tmp_path):
    """Without a lock one of them finds the partial file gone: so two trainings that began together on new data ended."""
    path = tmp_path / "note"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_slowly, args=(path, value)) for value in (b"a", b"b", b"c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert path.read_bytes() in (64 * b"a", 64 * b"b", 64 * b"c")
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_a_writer_waits_for_the_one_before_it_and_its_own_file_stays(tmp_path):
    path = tmp_path / "note"
    began = threading.Event()

    def second():
        began.set()
        with written_aside(path) as stream:
            assert path.read_bytes() == b"first"  # it waited
            stream.write(b"2")

    with ThreadPoolExecutor(1) as pool:
        with written_aside(path) as stream:
            waiting = pool.submit(second)
            began.wait()
            with pytest.raises(FutureTimeout):
                waiting.result(timeout=0.2)
            stream.write(b"first")
        waiting.result(timeout=60)
    assert path.read_bytes() == b"2"


def test_a_writer_that_waits_says_so_and_goes_on_where_the_first_fails(tmp_path, capsys):
    path = tmp_path / "note"

    def second():
        with written_aside(path) as stream:
            stream.write(b"2")

    def first(pool):
        with written_aside(path) as stream:
            waiting.append(pool.submit(second))
            with pytest.raises(FutureTimeout):
                waiting[0].result(timeout=0.2)
            stream.write("no bytes")

    waiting = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(TypeError):
            first(pool)
        waiting[0].result(timeout=60)
    assert path.read_bytes() == b"2"
    assert f"{path}.partial is being written by another process: waiting for it" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_a_failure_after_the_rename_leaves_the_next_writers_file(tmp_path, monkeypatch):
    """The name of the partial file is the next writer's by then."""
    path, plain = tmp_path / "note", durable.flush
    other = []

    def flush(folder):
        if not other:
            other.append(written_aside(path))
            other[0].__enter__().write(b"2")
            raise OSError(errno.EIO, "the disk fails")
        plain(folder)

    monkeypatch.setattr(durable, "flush", flush)
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: None)  # in one thread it would wait for itself
    with pytest.raises(OSError, match="the disk fails"), written_aside(path) as stream:
        stream.write(b"1")
    other[0].__exit__(None, None, None)
    assert path.read_bytes() == b"2"


def test_what_a_killed_writer_left_is_overwritten(tmp_path):
    path = tmp_path / "note"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=write_and_die, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert (tmp_path / "note.partial").read_bytes() == b"half of a long file"
    with written_aside(path) as stream:
        stream.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def write_and_die(path):
    with written_aside(path) as stream:
        stream.write(b"half of a long file")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", durable.NO_LOCKS)
def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, "no locks")))
    with written_aside(tmp_path / "note") as stream:
        stream.write(b"whole")
    assert (tmp_path / "note").read_bytes() == b"whole"


def test_a_lock_that_fails_otherwise_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "the disk fails")))
    with pytest.raises(OSError, match="the disk fails"), written_aside(tmp_path / "note"):
        pass
