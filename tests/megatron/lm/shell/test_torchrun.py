"""torchrun's failures as one line, and the code of the process that failed."""

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.lm.shell import torchrun

ROOT = Path(__file__).parents[4]


def failure(code: int) -> ChildFailedError:
    return ChildFailedError("trainer", {3: ProcessFailure(local_rank=3, pid=os.getpid(), exitcode=code, error_file="<N/A>")})


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (failure(2), 2, "error: rank 3 ended with exit code 2; its own message, if it left one, is above\n"),
        (failure(-signal.SIGKILL), 137, "error: rank 3 was ended by SIGKILL; its own message, if it left one, is above\n"),
        (SignalException("stopped", signal.SIGTERM), 143, "error: ended by SIGTERM\n"),
        (ValueError("Unsupported nproc_per_node value: x"), 2, "error: Unsupported nproc_per_node value: x\n"),
    ],
)
def test_a_failure_is_a_line_and_its_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(asked: argparse.Namespace) -> None:
        assert (asked.nproc_per_node, asked.training_script) == ("2", "x.py")
        raise error

    monkeypatch.setattr(torch.distributed.run, "run", fails)
    assert torchrun.main(["--nproc-per-node", "2", "x.py"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("words", [["--nproc-per-node", "0"], ["--nproc-per-node=-1"], ["--nproc_per_node", "0"]], ids=" ".join)
def test_no_process_is_refused_at_once(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.distributed.run, "run", lambda asked: pytest.fail("torchrun started"))
    assert torchrun.main([*words, "x.py"]) == 2
    assert "--nproc-per-node is" in capsys.readouterr().err


SCRIPT = """
import os, signal, sys
from megatron.lm.shell.arguments import Parser
from megatron.lm.shell.exit_codes import command

@command
def main():
    parser = Parser()
    parser.add_argument("kind")
    kind, rank = parser.parse_args().kind, os.environ["RANK"]
    if kind == "both":
        raise ValueError(f"--lr 0: give more (seen on GPU {rank})")
    if kind == "second" and rank == "1":
        raise ValueError("shard 1 is damaged: restore it")
    if kind == "bug":
        raise KeyError("grad")
    if kind == "killed" and rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

sys.exit(main())
"""
BUG = r"error: this is a bug of the program, please report it \(KeyError: 'grad'\) with this traceback:\n(.|\n)*KeyError: 'grad'\n+"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        # The other process may fail first, and torchrun end this one before it prints.
        (["both"], 2, r"error( on rank 1)?: --lr 0: give more \(seen on GPU [01]\)\n"),
        (["second"], 2, r"error on rank 1: shard 1 is damaged: restore it\n"),
        pytest.param(
            [], 2, r"error: the following arguments are required: kind \(fails.py --help lists the flags\)\n", marks=pytest.mark.nightly(8)
        ),
        pytest.param(["bug"], 1, BUG, marks=pytest.mark.nightly(8)),
        pytest.param(["killed"], 137, r"error: rank 0 was ended by SIGKILL; its own message, .*\n", marks=pytest.mark.nightly(8)),
    ],
    ids=str,
)
def test_an_error_of_two_processes_is_one_line_and_the_exit_code(arguments: list[str], code: int, said: str, tmp_path: Path):
    """Before, torchrun added two lines of log, 35 of traceback and a table, and both processes printed the error."""
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = [sys.executable, "-m", "megatron.lm.shell.torchrun", "--standalone", "--nproc-per-node", "2", str(script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("flags", "own"), [(["--rdzv-endpoint=first:29400"], "1"), (["--rdzv_endpoint", "first"], "1"), (["--standalone"], None)]
)
def test_torchruns_that_meet_give_each_start_a_store_of_its_own(flags: list[str], own: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(torchrun.OWN_STORE, "")
    monkeypatch.delenv(torchrun.OWN_STORE)
    monkeypatch.setattr(torch.distributed.run, "run", lambda asked: None)
    assert torchrun.main([*flags, "x.py"]) == 0
    assert os.environ.get(torchrun.OWN_STORE) == own


def test_a_command_of_msamp_stands_where_torchrun_has_a_script():
    launch = [sys.executable, "-m", "megatron.lm.command.dispatch", "torchrun", "--nproc-per-node", "2", "msamp", "compare", "--frob"]
    done = subprocess.run(
        launch, env=dict(os.environ) | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--help" in done.stderr
