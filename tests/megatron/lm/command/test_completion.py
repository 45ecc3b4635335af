"""The completion scripts are read by their shells; bash completes commands, flags and files."""

import shlex
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


def test_the_words_of_the_commands_are_quoted_for_zsh():
    inside = completion.script("zsh", FLAGS).partition("local -a commands=(\n")[2].partition("\n  )\n")[0]
    assert [shlex.split(line) for line in inside.splitlines()] == [[f"{name}:{command.help}"] for name, command in COMMANDS.items()]
    assert any("'" in command.help for command in COMMANDS.values()), "an apostrophe ends a word in quotes"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script():
    subprocess.run(["zsh", "-n", "-c", completion.script("zsh", FLAGS)], check=True)


def test_flags_come_from_the_help(monkeypatch, capsys):
    def run(line, **_):
        name = line[-2]
        return subprocess.CompletedProcess(
            line, 0, f"usage: msamp {name} [-h] --in-{name} IN, see a--b and --x_y, --rl-* and --y-\n  --in-{name}", ""
        )

    monkeypatch.setattr(completion.subprocess, "run", run)
    assert completion.flags() == {name: [f"--in-{name}", "--x_y"] for name in COMMANDS}
    assert completion.main(["bash"]) == 0
    assert "plan) words='--in-plan --x_y' ;;" in capsys.readouterr().out


def test_flags_of_a_command_s_commands_are_its_own_too(monkeypatch):
    def run(line, **_):
        words = line[line.index("megatron.lm.command.dispatch") + 1 : -1]
        usage = "usage: msamp [-h] {one,other} ..." if len(words) == 1 else f"usage: msamp [-h] --{words[1]} X"
        return subprocess.CompletedProcess(line, 0, f"{usage}\n\nwords", "")

    monkeypatch.setattr(completion.subprocess, "run", run)
    assert completion.flags()["plan"] == ["--one", "--other"]


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
    assert "--out" in found["prepare-text"]
    assert all("--help" in of_command for of_command in found.values())
