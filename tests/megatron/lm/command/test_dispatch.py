"""The command `msamp`: it runs the module of a name, refuses unknown and removed names, and prints what an issue form asks for."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import msamp
from megatron.lm.command import dispatch, environment

ROOT = Path(__file__).resolve().parents[4]


def test_every_command_names_a_module_with_a_main():
    for command in dispatch.COMMANDS.values():
        assert "\ndef main(" in Path(str(importlib.util.find_spec(command.module).origin)).read_text(encoding="utf-8"), command


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]], ids=str)
def test_without_a_command_it_prints_the_help(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["msamp"])
    assert dispatch.main(words) == 0
    assert all(f"\n  {name} " in capsys.readouterr().out for name in ["pretrain"])


@pytest.mark.parametrize(("name", "fix"), [("pretrian", "pretrain"), ("", "pretrain"), ("frobnicate", "msamp --help lists")])
def test_an_unknown_command_is_refused_in_a_line(name, fix, capsys):
    assert dispatch.main([name, "--lr", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert fix in printed.err
    assert printed.err.count("\n") == 1


def test_env_prints_versions_and_settings_and_no_password(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert environment.main([]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["msamp"].startswith(msamp.__version__)
    assert lines["torch"].startswith(torch.__version__)
    assert (lines["megatron-core"], lines["NCCL_DEBUG"]) == ("0.16.1", "INFO")
    assert "secret" not in str(lines)


@pytest.mark.parametrize(("word", "text"), [("env", "not installed"), ("--version", msamp.__version__)])
def test_it_answers_without_any_package(word, text, tmp_path):
    """`-S` leaves the interpreter without its site-packages."""
    command = [sys.executable, "-S", "-m", "megatron.lm.command.dispatch", word]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert text in done.stdout
