"""torchrun's failures as one line, and the code of the process that failed."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.lm.shell import torchrun


def failure(code: int) -> ChildFailedError:
    return ChildFailedError("trainer", {3: ProcessFailure(local_rank=3, pid=os.getpid(), exitcode=code, error_file="<N/A>")})


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (failure(2), 2, "error: rank 3 ended with exit code 2; what it said stands above\n"),
        (failure(-signal.SIGKILL), 137, "error: rank 3 was ended by SIGKILL; what it said stands above\n"),
        (SignalException("stopped", signal.SIGTERM), 143, "error: ended by SIGTERM\n"),
        (ValueError("Unsupported nproc_per_node value: x"), 2, "error: Unsupported nproc_per_node value: x\n"),
    ],
)
def test_a_failure_is_a_line_and_its_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(argv: list[str]) -> None:
        assert argv == ["--nproc-per-node", "2", "x.py"]
        raise error

    monkeypatch.setattr(torch.distributed.run, "main", fails)
    assert torchrun.main(["--nproc-per-node", "2", "x.py"]) == code
    assert capsys.readouterr().err == line


def test_it_is_torchrun(monkeypatch: pytest.MonkeyPatch):
    called = SimpleNamespace(argv=None)
    monkeypatch.setattr(torch.distributed.run, "main", lambda argv: setattr(called, "argv", argv))
    assert torchrun.main(["--standalone", "x.py"]) == 0
    assert called.argv == ["--standalone", "x.py"]


@pytest.mark.nightly(20)
def test_a_refusal_of_the_trainer_reaches_the_caller(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "refuses.py"
    script.write_text("import sys\nprint('error: --lr 0', file=sys.stderr)\nsys.exit(2)\n", encoding="utf-8")
    assert torchrun.main(["--standalone", "--nproc-per-node", "1", str(script)]) == 2
    said = capfd.readouterr().err
    assert "error: --lr 0" in said
    assert "error: rank 0 ended with exit code 2" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "own"), [(["--rdzv-endpoint=first:29400"], "1"), (["--rdzv_endpoint", "first"], "1"), (["--standalone"], None)]
)
def test_torchruns_that_meet_give_each_start_a_store_of_its_own(flags: list[str], own: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(torchrun.OWN_STORE, "")
    monkeypatch.delenv(torchrun.OWN_STORE)
    monkeypatch.setattr(torch.distributed.run, "main", lambda argv: None)
    assert torchrun.main([*flags, "x.py"]) == 0
    assert os.environ.get(torchrun.OWN_STORE) == own
