"""Folders that appear whole or not at all, and text that is read or refused by name."""

from pathlib import Path

import pytest

from megatron.lm.shell.files import made_folder, new_folder, read_text


def fails_after(file):
    file.write_text("x")
    raise ZeroDivisionError


@pytest.mark.promise("Tools", "A converted folder appears complete or not at all, and nothing is overwritten.")
def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    output = tmp_path / "deep" / "out"
    with new_folder(output) as partial:
        (partial / "x").write_text("x")
        assert not output.exists()
    assert (output / "x").read_text() == "x"
    with pytest.raises(ValueError, match="exists and is not an empty folder: choose another"), new_folder(output):
        pass
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other"):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]


def test_an_empty_folder_is_filled_and_anothers_work_left_alone(tmp_path, monkeypatch):
    output = tmp_path / "out"
    output.mkdir()
    monkeypatch.chdir(output)
    with new_folder(Path(".")) as partial:
        (partial / "x").write_text("x")
    assert (output / "x").is_file()
    (tmp_path / "busy.partial").mkdir()
    (tmp_path / "busy.partial" / "y").write_text("y")
    with pytest.raises(ValueError, match="another conversion is writing it, or one was killed"), new_folder(tmp_path / "busy"):
        pass
    assert (tmp_path / "busy.partial" / "y").is_file()


@pytest.mark.promise("Tools", "A refused call leaves nothing behind, not even a created parent folder.")
def test_parents_that_were_made_go_with_a_refusal_and_others_stay(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "o" / "deep" / "out"):
        raise ZeroDivisionError
    assert not (tmp_path / "o").exists()
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "o" / "deep" / "out"):
        fails_after(tmp_path / "o" / "another's")
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["another's"]


def test_a_folder_that_was_there_keeps_what_it_held(tmp_path):
    with pytest.raises(ZeroDivisionError), made_folder(tmp_path / "o" / "out") as made:
        fails_after(made / "x")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError), made_folder(tmp_path / "out") as made:
        fails_after(made / "x")
    assert (tmp_path / "out" / "x").is_file()
    with pytest.raises(ValueError, match="out/x is a file: give a folder"), made_folder(tmp_path / "out" / "x"):
        pass
    with pytest.raises(ValueError, match="cannot write /proc/none"), made_folder(Path("/proc/none")):
        pass


def test_a_device_is_no_text():
    with pytest.raises(ValueError, match="/dev/full is a device: give a log"):
        read_text(Path("/dev/full"), "a log")
    with pytest.raises(ValueError, match=r"cannot be read .File name too long.: give a log"):
        read_text(Path("x" * 300), "a log")


def test_text_is_read_or_refused_by_name(tmp_path):
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a is not UTF-8 text .* at byte 2\): give the metrics"):
        read_text(tmp_path / "a", "the metrics")
    with pytest.raises(ValueError, match=r"none does not exist: give the metrics"):
        read_text(tmp_path / "none", "the metrics")


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert read_text(tmp_path / "a.txt", "text") == "text"
