"""Files and folders: whole or not there, no write through a link, no wait on a pipe, and text that is read or refused by name."""

import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from megatron.lm.shell.files import new_folder, own_folder, read_input, to_write, written_aside


def test_a_file_is_whole_or_not_there(tmp_path: Path):
    path = tmp_path / "note"
    with written_aside(path) as stream:
        stream.write(b"first")
        assert not path.exists()
    with pytest.raises(TypeError), written_aside(path) as stream:
        stream.write("no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def write_slowly(path: Path, value: bytes) -> None:
    for _ in range(40):
        with written_aside(path) as stream:
            for _ in range(64):
                stream.write(value)
                stream.flush()
        assert path.read_bytes() in (64 * b"a", 64 * b"b")


def test_two_processes_that_write_one_path_at_once_leave_one_whole_file(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_slowly, args=(tmp_path / "note", value)) for value in (b"a", b"b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_the_modes_keep_append_and_empty(tmp_path: Path):
    file = tmp_path / "f"
    for mode, data, content in (("r+b", b"one", b"one"), ("ab", b" two", b"one two"), ("r+b", b"O", b"One two"), ("wb", b"3", b"3")):
        with to_write(file, mode) as stream:
            stream.write(data)
        assert file.read_bytes() == content


@pytest.mark.parametrize("mode", ["r+b", "ab", "wb"])
def test_links_pipes_and_folders_are_not_written(tmp_path: Path, mode: str):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(ValueError, match=name):
            to_write(tmp_path / name, mode)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="link"):
        own_folder(tmp_path / "link")


@pytest.mark.promise("Tools", "A converted folder appears complete or not at all, and nothing is overwritten.")
def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path):
    output = tmp_path / "deep" / "out"
    with new_folder(output) as partial:
        (partial / "x").write_text("x")
        assert not output.exists()
    assert (output / "x").read_text() == "x"
    with pytest.raises(ValueError, match="--output"), new_folder(output):
        pass
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other" / "deep"):
        raise ZeroDivisionError
    with new_folder(tmp_path / "busy"), pytest.raises(ValueError, match=r"busy\.partial"), new_folder(tmp_path / "busy"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "deep"]


def test_what_a_killed_writer_left_is_deleted_by_the_next(tmp_path: Path):
    (tmp_path / "out.partial" / "deep").mkdir(parents=True)
    (tmp_path / "out.partial" / "deep" / "x").write_text("torn")
    with new_folder(tmp_path / "out") as partial:
        (partial / "y").write_text("y")
    (tmp_path / "note.01234567.partial").write_text("torn")
    (tmp_path / "other.01234567.partial").write_text("another file's")
    with written_aside(tmp_path / "note") as slow:
        slow.write(b"slow")
        slow.flush()
        with written_aside(tmp_path / "note") as quick:
            quick.write(b"quick")
        assert (tmp_path / "note").read_bytes() == b"quick"
    assert (tmp_path / "note").read_bytes() == b"slow"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        *("note", "other.01234567.partial", "out", "out/y")
    ]


def test_text_is_read_or_refused_by_name(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbftext")
    assert read_input(tmp_path / "text", "a log") == "text"
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    os.mkfifo(tmp_path / "pipe")
    for name in ("bytes", "pipe", "none", "x" * 300):
        with pytest.raises(ValueError, match=name):
            read_input(tmp_path / name, "a log")


TORCHS = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 0, True),
        (ValueError("I/O error: No space left on device (os error 28)"), 0, True),
        (TORCHS, 100, True),
        (TORCHS, 2**30, False),
        (PermissionError(13, "Permission denied"), 0, False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2**40, False),
    ],
    ids=["Python", "safetensors", "torch", "torch, with space", "permission", "quota"],
)
def test_a_full_disk_is_one_line_with_path_and_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, free: int, full: bool
):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, free))

    def write() -> None:
        with new_folder(tmp_path / "o") as partial:
            (partial / "written").write_bytes(bytes(1000))
            raise error

    with pytest.raises(ValueError if full or isinstance(error, OSError) else type(error)) as raised:
        write()
    assert (f"cannot write {tmp_path / 'o'} (1,000 bytes were written and {free:,} are free: No space" in str(raised.value)) == full
    assert list(tmp_path.iterdir()) == []
