"""The completion scripts are read by their shells; bash completes commands, flags and files."""

import shutil
import subprocess

import pytest

from megatron.lm.command import completion
from megatron.lm.command.dispatch import COMMANDS
from megatron.lm.errors import RunStopped

FLAGS = {name: [f"--of-{name}", "--help"] for name in COMMANDS}


def completed(*words: str, cwd: str = ".") -> list[str]:
    """What bash offers for the last of `words`."""
    line = (
        f"{completion.script('bash', FLAGS)}\nCOMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _msamp\n"
    )
    line += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc", "-euc", line], capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout.split()


def test_bash_completes_commands_flags_and_files(tmp_path):
    assert completed("msamp", "pre") == ["pretrain", "prepare-text", "preprocess"]
    assert set(completed("msamp", "")) == {*COMMANDS, "--help", "--version"}
    assert completed("msamp", "plan", "--o") == ["--of-plan"]
    assert completed("msamp", "plan", "--gpus", "--h") == ["--help"]
    assert completed("msamp", "unknown", "--h") == []
    (tmp_path / "data.jsonl").touch()
    assert completed("msamp", "preprocess", "--input", "da", cwd=str(tmp_path)) == ["data.jsonl"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script():
    subprocess.run(["zsh", "-n", "-c", completion.script("zsh", FLAGS)], check=True)


def test_flags_come_from_the_help(monkeypatch, capsys):
    def run(line, **_):
        name = line[-2]
        return subprocess.CompletedProcess(line, 0, f"usage: msamp {name} [-h] --in-{name} IN, see a--b and --x_y\n  --in-{name}", "")

    monkeypatch.setattr(completion.subprocess, "run", run)
    assert completion.flags() == {name: [f"--in-{name}", "--x_y"] for name in COMMANDS}
    assert completion.main(["bash"]) == 0
    assert "plan) words='--in-plan --x_y' ;;" in capsys.readouterr().out


def test_a_help_that_fails_ends_it(monkeypatch):
    monkeypatch.setattr(completion.subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, 2, "", "error: no torch"))
    with pytest.raises(RunStopped, match="msamp pretrain --help ended with exit code 2: error: no torch"):
        completion.flags()


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        completion.main(["fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err


@pytest.mark.nightly(90)
def test_the_flags_of_the_real_commands():
    found = completion.flags()
    assert "--opt-level" in found["pretrain"]
    assert "--json" in found["env"]
    assert all("--help" in of_command for of_command in found.values())
