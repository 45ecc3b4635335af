"""Files are opened for writing where no link leads out of their folder, and read where no pipe makes the reader wait."""

import os
import stat
from pathlib import Path

import pytest

from megatron.lm.shell.opening import new_file, own_folder, read_bytes, read_text, to_write


def test_the_modes_keep_append_and_empty(tmp_path: Path):
    file = tmp_path / "f"
    for mode, data, content in (("r+b", b"one", b"one"), ("ab", b" two", b"one two"), ("r+b", b"O", b"One two"), ("wb", b"3", b"3")):
        with to_write(file, mode) as stream:
            stream.write(data)
        assert file.read_bytes() == content
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize("mode", ["r+b", "ab", "wb"])
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_a_symbolic_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path, mode: str, there: bool):
    precious = tmp_path / "precious"
    if there:
        precious.write_text("precious")
    (tmp_path / "f").symlink_to(precious)
    with pytest.raises(ValueError, match=rf"f is a link to {precious}, but it must be a regular file: delete it, or choose another"):
        to_write(tmp_path / "f", mode)
    assert precious.read_text() == "precious" if there else not precious.exists()


@pytest.mark.parametrize("mode", ["r+b", "ab", "wb"])
def test_a_hard_link_is_refused_and_its_file_stays(tmp_path: Path, mode: str):
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "f")
    with pytest.raises(ValueError, match=r"f is a file with 2 names .hard links., and writing would change all of them: delete it"):
        to_write(tmp_path / "f", mode)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("mode", ["r+b", "ab", "wb"])
def test_pipes_folders_and_devices_are_refused_at_once(tmp_path: Path, mode: str):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a folder")):
        with pytest.raises(ValueError, match=f"{name} is {kind}, but it must be a regular file"):
            to_write(tmp_path / name, mode)
    with pytest.raises(ValueError, match="/dev/null is a device"):
        to_write(Path("/dev/null"), mode)


def test_a_device_that_may_be_one_is_written_through_a_link_too(tmp_path: Path):
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        with to_write(path, "ab", device=True) as stream:
            assert stream.write(b"x") == 1
    (tmp_path / "f").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="is a link"):
        to_write(tmp_path / "f", "ab", device=True)


def test_a_folder_that_is_missing_is_the_systems_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        to_write(tmp_path / "none" / "f")


def test_temporary_files_have_names_of_their_own(tmp_path: Path):
    made = [new_file(tmp_path / "note") for _ in range(5)]
    assert len({path for path, _ in made}) == 5
    assert all(path.parent == tmp_path and path.name.startswith("note.") and path.name.endswith(".partial") for path, _ in made)
    for _, stream in made:
        stream.close()


def test_what_is_no_regular_file_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ValueError, match=f"{path} is {kind}: put the file itself there"):
            read_bytes(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path):
    (tmp_path / "f").write_text("\u00e4", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert read_bytes(tmp_path / "link") == b"\xc3\xa4"
    assert read_text(tmp_path / "link") == "\u00e4"
    (tmp_path / "f").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="invalid start byte"):
        read_text(tmp_path / "f")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path):
    own_folder(tmp_path / "a" / "b")
    own_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="link is a link, and files would be written to its target: delete the link"):
        own_folder(tmp_path / "link")
