"""Files written aside."""

import errno
import multiprocessing
import os
import signal

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


def test_writers_at_once_have_files_of_their_own_and_the_last_one_to_end_stays(tmp_path):
    path = tmp_path / "note"
    with written_aside(path) as first:
        with written_aside(path) as second:
            second.write(b"2")
        assert path.read_bytes() == b"2"
        first.write(b"first")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_what_a_killed_writer_left_is_deleted_by_the_next_one(tmp_path):
    path = tmp_path / "note"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=write_and_die, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob("note.*.partial")
    assert left.read_bytes() == b"half of a long file"
    with written_aside(path) as stream:
        stream.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_a_file_taken_for_a_killed_writers_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    plain, calls = durable.fcntl.flock, []

    def flock(stream, operation):
        if not calls:
            (left,) = tmp_path.glob("note.*.partial")
            left.unlink()
        calls.append(operation)
        plain(stream, operation)

    monkeypatch.setattr(durable.fcntl, "flock", flock)
    with written_aside(tmp_path / "note") as stream:
        stream.write(b"whole")
    assert (tmp_path / "note").read_bytes() == b"whole"
    assert len(calls) == 2


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_link_in_the_way_is_replaced_and_what_it_leads_to_stays(tmp_path, link):
    (tmp_path / "precious").write_bytes(b"precious")
    link(tmp_path / "precious", tmp_path / "note")
    link(tmp_path / "precious", tmp_path / "note.0123abcd.partial")
    with written_aside(tmp_path / "note") as stream:
        stream.write(b"whole")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "note").read_bytes() == b"whole"


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
