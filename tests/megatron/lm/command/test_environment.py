"""`msamp env` prints what a bug report needs, and no password."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import msamp
from megatron.lm.command import environment

ROOT = Path(__file__).resolve().parents[4]


def test_versions_and_settings(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "secret")
    assert environment.main([]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["msamp"].startswith(msamp.__version__)
    assert lines["torch"].startswith(torch.__version__)
    assert lines["megatron-core"] == "0.16.1"
    assert lines["NCCL_DEBUG"] == "INFO"
    assert "secret" not in str(lines)


def test_as_json(capsys):
    assert environment.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:4] == ["msamp", "python", "system", "torch"]
    assert found["msamp"].startswith(msamp.__version__)


def test_the_commit_of_a_checkout_is_named_and_elsewhere_none(monkeypatch, tmp_path):
    asked = []

    def output(*line: str) -> str:
        asked.append(line)
        return {"log": "abc1234 of 2026-01-02", "status": " M setup.py"}[line[3]]

    monkeypatch.setattr(environment, "_output", output)
    (tmp_path / "msamp").mkdir()
    shutil.copy(msamp.__file__, tmp_path / "msamp")
    monkeypatch.setattr(environment, "msamp_file", lambda: tmp_path / "msamp/__init__.py")
    assert environment._msamp() == f"{msamp.__version__} ({tmp_path})"
    assert not asked
    (tmp_path / ".git").mkdir()
    assert environment._msamp() == f"{msamp.__version__}, commit abc1234 of 2026-01-02 with changes ({tmp_path})"


@pytest.mark.parametrize("line", [("false",), ("no-such-command",)])
def test_a_command_that_fails_leaves_its_place_empty(line):
    assert environment._output(*line) == ""


def test_gpus_and_their_links(monkeypatch):
    known = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda number: known,
        "get_device_capability": lambda device: (9, 0),
        "can_device_access_peer": lambda a, b: a < b,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(environment, "_output", lambda *line: "580.1\n580.1")
    found = dict(environment._torch())
    assert found["driver"] == "580.1"
    assert found["GPU 1"] == "NVIDIA H100, 80 GiB, compute capability 9.0, FP8 GEMMs"
    assert found["GPU to GPU"] == "1 of 2 directed pairs can copy directly"
    assert found["cuDNN, NCCL"].endswith(", 2.28.9")


@pytest.mark.parametrize(("word", "name", "value"), [("env", "torch", "not installed"), ("--version", "msamp", msamp.__version__)])
def test_it_answers_without_any_package(word, name, value, tmp_path):
    """`-S` leaves the interpreter without its site-packages."""
    command = [sys.executable, "-S", "-m", "megatron.lm.command.dispatch", word]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert lines["msamp"].startswith(msamp.__version__)
    assert lines[name] == value
