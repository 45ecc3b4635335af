"""Progress of long commands: when lines come, what they say, and that a terminal keeps none."""

import io
import time

import pytest

from megatron.lm.shell.progress import FIRST_SECONDS, SECONDS, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_within_five_seconds_and_say_what_is_done():
    assert FIRST_SECONDS < 5
    assert SECONDS <= 5
    stream = io.StringIO()
    with Progress("to-hf checkpoints", stream, first=0.02, seconds=0.02) as progress:
        assert sum(progress.counted(range(4), 8, "tensors")) == 6
        time.sleep(0.2)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert lines[-1].startswith("to-hf checkpoints: 4 of 8 tensors (50 %), 0 s, ")
    assert lines[-1].endswith(" s left")


def test_what_is_quick_prints_nothing():
    stream = io.StringIO()
    with Progress("quick", stream):
        pass
    assert stream.getvalue() == ""


def test_a_terminal_rewrites_one_line_and_is_left_clean():
    stream = Terminal()
    with Progress("slow", stream, first=0.01, seconds=0.01):
        time.sleep(0.1)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().startswith("\r\x1b[2Kslow: 0 s")
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_an_unknown_total_is_counted_all_the_same():
    with Progress("perplexity", io.StringIO()) as progress:
        progress.begin("perplexity of a", None, "tokens")
        progress.done += 1234
        assert progress.line() == "perplexity of a: 1,234 tokens, 0 s"
        progress.begin("perplexity of b", 0, "tokens")
        assert progress.line() == "perplexity of b: 0 tokens, 0 s"


def test_an_error_ends_the_lines():
    stream = io.StringIO()
    progress = Progress("fails", stream, first=0.01, seconds=0.01)
    with pytest.raises(ValueError, match="no"), progress:
        raise ValueError("no")
    assert not progress._thread.is_alive()
