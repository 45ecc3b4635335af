"""What people read: colors on a terminal only, at most 120 columns, progress that rewrites one line, and no control characters of files."""

import io
import sys
import time

import pytest

from megatron.lm.shell import exit_codes
from megatron.lm.shell.progress import Progress
from megatron.lm.shell.streams import printable
from megatron.lm.shell.terminal import WIDTH, Part, fitted, show, wrapped

PARTS = [Part("10:52:40", "dim"), Part("loss 4.19", "bold green")]
HOSTILE = "layer\x1b[2J\x1b]0;title\x07\r\x9b1m‮"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's own environment says about colours does not count."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_file_gets_plain_text_and_a_terminal_colours(capsys: pytest.CaptureFixture[str]):
    show(PARTS)
    assert capsys.readouterr().out == "10:52:40  loss 4.19\n"
    show(PARTS, terminal := Terminal())
    assert "\x1b[1;32mloss 4.19\x1b[0m" in terminal.getvalue()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    show(PARTS, terminal := Terminal())
    assert "\x1b[1;32m" not in terminal.getvalue()


def test_the_highest_rank_goes_first_and_rank_0_stays():
    parts = [Part("a" * 60), Part("b" * 30, rank=1), Part("c" * 40, rank=2)]
    assert fitted(parts) == parts[:2]
    assert fitted([Part("a" * 200)]) == [Part("a" * 200)]


def test_long_text_is_wrapped_and_paths_stay_whole():
    lines = wrapped("word " * 60 + "/p" * 100).splitlines()
    assert all(len(line) <= WIDTH for line in lines[:-1])
    assert lines[-1] == "    " + "/p" * 100


@pytest.mark.promise("Tools", "Control characters in names and text from files reach no terminal.")
def test_a_command_prints_no_control_character(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    @exit_codes.command
    def main() -> None:
        print(f"{HOSTILE}\tü\n", end="")
        raise ValueError(HOSTILE)

    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == "layer\\x1b[2J\\x1b]0;title\\x07\\x0d\\x9b1m\\u202e\tü\n"
    assert not set(HOSTILE[5:]) & set("\x1b\x07\r\x9b‮") & set(printed.err)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with printable():
        show([Part(HOSTILE, "bold green")])
    assert "\x1b[1;32m" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()


def test_what_an_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held := io.BytesIO(), encoding="ascii"))
    with printable():
        print("ü")
    sys.stdout.flush()
    assert held.getvalue() == b"\\xfc\n"


def test_progress_says_what_is_done_and_rewrites_a_line_of_a_terminal():
    stream, terminal = io.StringIO(), Terminal()
    for where in (stream, terminal):
        with Progress("to-hf checkpoints", where, first=0.02, seconds=0.02) as progress:
            assert sum(progress.counted(range(4), 8, "tensors")) == 6
            time.sleep(0.2)
    assert stream.getvalue().splitlines()[-1].startswith("to-hf checkpoints: 4 of 8 tensors (50 %), 0 s, ")
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")
