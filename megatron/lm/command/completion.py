"""Print a script that completes the command `msamp` in a shell:

    msamp completion bash > ~/.local/share/bash-completion/completions/msamp
    msamp completion zsh > "${fpath[1]}/_msamp"

It completes commands, the flags of each, and otherwise files. The flags belong to this version: print it again after an update.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.lm.command.dispatch import COMMANDS
from megatron.lm.errors import RunStopped
from megatron.lm.shell import arguments, exit_codes

SHELLS = ("bash", "zsh")
_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*\w(?![\w*-])")  # no family of flags, such as --rl-*
_PARTS = re.compile(r"^usage:.* \{([\w,-]+)\}\s+\.\.\.", re.DOTALL)  # commands of a command


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    print(script(shell, flags()))


def flags() -> dict[str, list[str]]:
    """Return the flags of every command, from its help.

    Raises:
        RunStopped: the help of a command cannot be printed.
    """
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(COMMANDS, pool.map(_flags_of, COMMANDS), strict=True))


def _flags_of(name: str) -> list[str]:
    text = _help_of(name)
    parts = _PARTS.match(text.partition("\n\n")[0])
    texts = [text, *(_help_of(name, part) for part in parts[1].split(","))] if parts else [text]
    return sorted({flag for one in texts for flag in _FLAG.findall(one)})


def _help_of(*words: str) -> str:
    line = [sys.executable, "-W", "ignore", "-m", "megatron.lm.command.dispatch", *words, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunStopped(f"msamp {' '.join(words)} --help ended with exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def script(shell: str, flags: Mapping[str, Sequence[str]]) -> str:
    """Return the script for `shell`, one of `SHELLS`."""
    cases = "\n".join(f"    {name}) words='{' '.join(of_command)}' ;;" for name, of_command in flags.items())
    body = f"""\
_msamp() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" = 1 ]; then
    mapfile -t COMPREPLY < <(compgen -W '{" ".join(flags)} --help --version' -- "$current")
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  case $current in
    -*) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current") ;;
    *) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
  esac
}}
complete -o filenames -F _msamp msamp"""
    if shell == "bash":
        return body
    names = "\n".join(f"    {shlex.quote(f'{name}:{command.help}')}" for name, command in COMMANDS.items())
    arrays = "\n".join(f"    {name}) compadd -- {' '.join(of_command)} ;;" for name, of_command in flags.items())
    return f"""\
#compdef msamp
_msamp() {{
  local -a commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  if [[ $PREFIX != -* ]]; then
    _files
    return
  fi
  case ${{words[2]}} in
{arrays}
  esac
}}
_msamp "$@\""""


if __name__ == "__main__":
    sys.exit(main())
