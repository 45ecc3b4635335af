"""A run that stops is not a refused command line; and of one error that all processes have, the first of a machine prints it."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.lm import errors
from megatron.lm.errors import RunStopped, report
from megatron.lm.shell import exit_codes


def test_a_stopped_run_ends_with_its_own_exit_code_and_its_words(capsys):
    @exit_codes.command
    def main() -> None:
        raise RunStopped("the loss is not finite")

    assert main() == exit_codes.STOPPED
    assert "the loss is not finite" in capsys.readouterr().err


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of error files, as torchrun makes it for two processes; this is the second of them."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    monkeypatch.setattr(errors, "FIRST_RANK_SECONDS", 0.3)
    return tmp_path


def left(attempt: Path, rank: int) -> str:
    return json.loads((attempt / str(rank) / "error.json").read_text(encoding="utf-8"))["message"]["message"]


def test_the_first_process_prints_at_once_and_leaves_its_error(attempt: Path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "0" / "error.json"))
    report("error: no memory", "no memory")
    assert capsys.readouterr().err == "error: no memory\n"
    assert left(attempt, 0) == "no memory"


@pytest.mark.parametrize(
    ("first", "printed"),
    [("GPU 0: no memory", ""), ("the disk is full", "error: GPU 1: no memory\n"), (None, "error: GPU 1: no memory\n")],
)
def test_another_process_prints_what_the_first_does_not(first: str | None, printed: str, attempt: Path, capsys):
    if first is not None:
        (attempt / "0" / "error.json").write_text(json.dumps({"message": {"message": first}}), encoding="utf-8")
    report("error: GPU 1: no memory", "GPU 1: no memory")
    assert capsys.readouterr().err == printed
    assert left(attempt, 1) == "GPU 1: no memory"


def test_an_error_that_is_still_being_written_is_waited_for(attempt: Path, monkeypatch, capsys):
    file = attempt / "0" / "error.json"
    file.write_text('{"message": {"mess', encoding="utf-8")
    monkeypatch.setattr(errors, "FIRST_RANK_SECONDS", 20.0)
    whole = json.dumps({"message": {"message": "no memory"}})
    writer = threading.Timer(0.2, lambda: file.write_text(whole, encoding="utf-8"))
    writer.start()
    report("error: no memory", "no memory")
    writer.join()
    assert capsys.readouterr().err == ""


def test_a_process_that_is_ended_while_it_waits_still_prints(attempt: Path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "FIRST_RANK_SECONDS", 60.0)
    before, started = signal.getsignal(signal.SIGTERM), time.monotonic()
    killer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    report("error: mine alone", "mine alone")
    killer.join()
    assert time.monotonic() - started < 20
    assert capsys.readouterr().err == "error: mine alone\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_torchrun_every_process_prints(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    report("error: no", "no")
    assert capsys.readouterr().err == "error: no\n"
