"""The command `msamp watch`, on recorded files."""

import sys
from pathlib import Path

import pytest

from helpers import watched
from helpers.watched import end, lines, train
from megatron.lm.tools.watch import command
from megatron.lm.tools.watch.run_files import MOST_RUNS


def test_into_a_pipe_it_prints_once_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched.folder(tmp_path / "runs", end(30, "stopped", "SIGTERM"))
    assert command.main([str(tmp_path / "runs"), "--page", str(tmp_path / "w.html")]) == 0
    printed = capsys.readouterr().out
    assert "runs  O2  stopped at iteration 30 of 100: SIGTERM\n" in printed
    assert "\x1b" not in printed
    assert "stopped at iteration 30" in (tmp_path / "w.html").read_text(encoding="utf-8")


def test_a_folder_without_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path)]) == 0
    assert f"no run in {tmp_path} yet: a trainer with --metrics-file in this folder appears here" in capsys.readouterr().out


def test_it_looks_until_every_run_has_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = watched.folder(tmp_path / "a") / "metrics.jsonl"
    watch = command.Watch(tmp_path, tmp_path / "w.html", 2)
    assert watch.look(stays=False)
    assert command.CLEAR in capsys.readouterr().out
    assert 'content="2"' in (tmp_path / "w.html").read_text(encoding="utf-8")
    lines(path, train(40, 1.0), more=True)
    assert watch.look(stays=False)
    assert "1.0000" in capsys.readouterr().out
    lines(path, end(100), more=True)
    assert not watch.look(stays=False)
    assert "completed at iteration 100 of 100" in capsys.readouterr().out
    assert "refresh" not in (tmp_path / "w.html").read_text(encoding="utf-8")


def test_older_runs_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(MOST_RUNS + 2):
        lines(tmp_path / f"run{number}" / "metrics.jsonl", watched.START)
    assert command.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  O2  ") == MOST_RUNS
    assert f"2 runs written before these {MOST_RUNS} are not shown: give the folder of one" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "nowhere does not exist: give a run's folder"),
        ([".", "--page", "metrics.jsonl"], "--page metrics.jsonl must end in .html, so that no file of a run is overwritten"),
        ([".", "--interval", "0"], "0 is out of range: give 1 to 3600"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, flags: list[str], message: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(command.main(flags))
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
