"""`msamp NAME` runs the module of that name, and says what to do where there is none."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

import msamp
from megatron.lm.command import dispatch


def test_every_command_names_a_module_with_a_main():
    for name, command in dispatch.COMMANDS.items():
        found = importlib.util.find_spec(command.module)
        assert found is not None, name
        with open(found.origin) as stream:
            assert "\ndef main(" in stream.read(), name


def test_help_lists_every_command_without_torch():
    line = "import sys; from megatron.lm.command.dispatch import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in done.stdout for name in dispatch.COMMANDS)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_without_a_command_it_prints_the_help(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["msamp"])
    assert dispatch.main(words) == 0
    assert capsys.readouterr().out == dispatch.usage() + "\n"


def test_version(capsys):
    assert dispatch.main(["--version"]) == 0
    assert capsys.readouterr().out == f"msamp {msamp.__version__}\n"


@pytest.mark.parametrize(
    ("name", "fix"), [("pretrian", "did you mean pretrain?"), ("", "Choose one of pretrain"), ("--x", "Choose one of")]
)
def test_an_unknown_command_is_refused(name, fix, capsys):
    assert dispatch.main([name, "--lr", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert fix in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3)])
def test_the_module_gets_the_arguments_and_gives_the_exit_code(result, code, monkeypatch):
    got = []
    module = SimpleNamespace(main=lambda words: got.append((sys.argv[0], words)) or result)
    monkeypatch.setattr(sys, "argv", ["/bin/msamp", "plan", "--gpus", "8"])
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: {"megatron.lm.tools.plan": module}[name])
    assert dispatch.main() == code
    assert got == [("msamp plan", ["--gpus", "8"])]


def test_a_missing_package_is_named(monkeypatch, capsys):
    def fail(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(sys, "argv", ["msamp"])
    monkeypatch.setattr(dispatch.importlib, "import_module", fail)
    assert dispatch.main(["plan"]) == 2
    assert "has no torch: activate the environment" in capsys.readouterr().err


def test_a_module_of_ours_that_is_missing_is_a_bug(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(name, name="megatron.lm.tools.plan")

    monkeypatch.setattr(sys, "argv", ["msamp"])
    monkeypatch.setattr(dispatch.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        dispatch.main(["plan"])
