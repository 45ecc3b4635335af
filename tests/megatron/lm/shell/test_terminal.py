"""Lines for people: plain in a file, coloured on a terminal, and at most 120 columns wide."""

import io
import sys

import pytest

from megatron.lm.shell.terminal import WIDTH, Part, fitted, show, wrapped

PARTS = [Part("10:52:40", "dim"), Part("loss 4.19", "bold green")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's own environment says about colours does not count."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_file_gets_plain_text(capsys: pytest.CaptureFixture[str]):
    show(PARTS)
    assert capsys.readouterr().out == "10:52:40  loss 4.19\n"


def test_a_terminal_gets_colours_and_the_same_text():
    terminal = Terminal()
    show(PARTS, terminal)
    assert "\x1b[1;32mloss 4.19\x1b[0m" in terminal.getvalue()
    show([Part("x" * 300)], terminal := Terminal())
    assert terminal.getvalue().count("\n") == 1  # the terminal wraps it, not we


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    show(PARTS, terminal := Terminal())
    assert "\x1b[1;32m" not in terminal.getvalue()
    assert "loss 4.19" in terminal.getvalue()


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(PARTS, terminal := Terminal())
    assert terminal.getvalue() == "10:52:40  loss 4.19\n"


def test_the_highest_rank_goes_first_and_rank_0_stays():
    parts = [Part("a" * 60), Part("b" * 30, rank=1), Part("c" * 40, rank=2)]
    assert fitted(parts) == parts[:2]
    assert fitted([Part("a" * 200)]) == [Part("a" * 200)]
    assert fitted(parts, 200) == parts


def test_long_text_is_wrapped_and_paths_stay_whole():
    lines = wrapped("word " * 60 + "/p" * 100).splitlines()
    assert all(len(line) <= WIDTH for line in lines[:-1])
    assert lines[1].startswith("    word")
    assert lines[-1] == "    " + "/p" * 100
