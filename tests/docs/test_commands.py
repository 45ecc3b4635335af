"""Every command that README, the documentation and the READMEs of examples print is one that runs: programs, flags, extras and targets.

Trainings and downloads are not started. A command of the trainer is parsed, and judged by the trainer's rules but for files that a reader
brings; another Python program runs up to the point at which it has parsed its flags; a launch script runs with an interpreter that prints
what it is called with.
"""

import argparse
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import post_runs
from megatron.lm.command import dispatch
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.tools import plan

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
NAMED = {  # what stands for flags that another command prints, and for the value of a loop
    "FLAGS_AS_PRINTED": "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64",
    "$level": "O3",
}
# Files that the reader brings or another command makes, and a package that this machine may lack.
OF_THE_READER = ("not exist", "--tokenizer-type is missing", "is not a folder", "which is not installed")
SHELL = {"for", "done", "source", "export"}


class Command(NamedTuple):
    """Words of a command line after the variables that stand before them."""

    page: str
    variables: dict[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"[:100]


def commands(page: Path) -> list[Command]:
    """Those of the shell blocks of a page; without the lines of here-documents."""
    found = []
    for block in re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        block = re.sub(r"<<'(\w+)'.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
        for name, flags in NAMED.items():
            block = block.replace(name, flags)
        for line in block.splitlines():
            words = shlex.split(line.partition(" >")[0], comments=True)
            variables = {}
            while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words and words[0] not in SHELL:
                found.append(Command(str(page.relative_to(ROOT)), variables, tuple(words)))
    return found


COMMANDS = [command for page in PAGES for command in commands(page)]


def of(*programs: str) -> list[Command]:
    return [command for command in COMMANDS if command.words[0] in programs]


class _Parsed(BaseException):
    """A program has parsed its flags."""


def takes_its_flags(main: Callable[[], object], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` runs up to where its flags are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_leave(self: argparse.ArgumentParser, args=None, namespace=None):
        parse(self, args, namespace)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(_Parsed):
        main()


def processes(command: Command, flags: list[str]) -> int:
    """How many the launcher's flags or variables start."""
    given = dict(itertools.pairwise(flags))
    return int(given.get("--nproc-per-node", command.variables.get("WORLD_SIZE", 1))) * int(given.get("--nnodes", 1))


def trainer_accepts(flags: list[str], world_size: int) -> None:
    """The trainer parses the flags, and nothing is wrong with them but that the reader's files are not here."""
    if "--help" in flags:
        return
    config = parse_args([flag for flag in flags if flag != "..."])
    try:
        check(config, world_size)
    except ValueError as error:
        problems = [line for line in str(error).splitlines()["\n" in str(error) :] if not any(words in line for words in OF_THE_READER)]
        assert "..." in flags or problems == []


def runs(command: Command, module: str, flags: list[str], world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m MODULE FLAGS` does."""
    if module == "megatron.lm.pretrain":
        trainer_accepts(flags, world_size)
    elif module == "megatron.lm.shell.torchrun":
        at = flags.index("msamp")
        runs(command, dispatch.COMMANDS[flags[at + 1]].module, flags[at + 2 :], processes(command, flags[:at]), monkeypatch)
    elif module == "megatron.lm.tools.plan":
        assert plan.configuration(*plan.parser().parse_known_args(flags))
    elif module not in ("venv", "pip", "zipfile"):
        found = importlib.import_module("tools.reproduce.__main__" if module == "tools.reproduce" else module)
        takes_its_flags(found.main, [module, *flags], monkeypatch)
    elif module == "pip":
        installs(flags)


def installs(words: list[str]) -> None:
    """No name that no registry has, and no extra that setup.py lacks."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for word in words:
        assert not word.startswith("msamp"), f"{word} is not published: write -e '.[...]'"
        if word.startswith(".["):
            assert [extra for extra in word[2:-1].split(",") if f'        "{extra}": [' not in setup] == []


def test_python_programs_take_their_flags():
    for command in of("python", "python3", ".venv/bin/python"):
        with pytest.MonkeyPatch.context() as patch:
            python_program(command, patch)


def python_program(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of `python FILE FLAGS` or `python -m MODULE FLAGS` takes its flags."""
    _, first, *flags = command.words
    if first == "-m":
        runs(command, flags[0], flags[1:], processes(command, []), monkeypatch)
    elif first.startswith("examples/"):
        pytest.importorskip("transformers")
        takes_its_flags(post_runs.example(first.removeprefix("examples/")).main, [first, *flags], monkeypatch)
    elif first == "-c":
        compile(flags[0], "-c", "exec")
    elif first != "-":
        monkeypatch.syspath_prepend(str(ROOT / first).rpartition("/")[0])
        takes_its_flags(importlib.import_module(first.removesuffix(".py").replace("/", ".")).main, [first, *flags], monkeypatch)


@pytest.mark.parametrize("command", of("msamp"), ids=str)
def test_msamp_runs_a_command_that_takes_its_flags(command: Command, monkeypatch: pytest.MonkeyPatch):
    _, name, *flags = command.words
    if name != "--help":
        runs(command, dispatch.COMMANDS[name].module, flags, processes(command, []), monkeypatch)


@pytest.mark.parametrize("command", of("bash"), ids=str)
def test_a_launch_script_runs(command: Command, tmp_path: Path):
    script, *flags = command.words[1:]
    assert (ROOT / script).is_file()
    for name in ("corpus.bin", "tokenizer.json", "train_text_document.bin", "valid_text_document.bin"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[ "$1" = -c ] || printf "%q " "$@"\necho\n', encoding="utf-8")
    python.chmod(0o755)
    data = str(tmp_path / "corpus") if "corpus" in command.variables.get("DATA", "") else str(tmp_path)
    environment = {"PATH": os.environ["PATH"]} | command.variables | {"PYTHON": str(python), "ON_CPU": "1", "OUT": str(tmp_path / "out")}
    environment |= {} if script.startswith("examples/bert") else {"DATA": data}
    done = subprocess.run(["bash", script, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    started = [shlex.split(line) for line in done.stdout.splitlines() if "megatron.lm.pretrain" in line]
    assert started
    for words in started:
        parse_args(words[words.index("megatron.lm.pretrain") + 1 :])


def test_make_has_the_targets():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert [str(command) for command in of("make") for word in command.words[1:] if "=" not in word and word not in targets] == []


def test_pip_installs_what_there_is():
    for command in of("pip"):
        installs(list(command.words[1:]))
