"""SIGINT in a block that holds nothing: the line, the exit code, and that other handlers stay."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.lm.shell.interrupt import LeavingAtOnce, line

ROOT = Path(__file__).parents[4]

LEAVES = """
import os, signal, sys, threading
from megatron.lm.shell.interrupt import LeavingAtOnce

def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.default_int_handler)
    with LeavingAtOnce():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            print("it was unwound")
        finally:
            print("it went on")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

main()
"""


@pytest.mark.parametrize(
    ("kind", "rank", "ended"),
    [
        ("taken", "0", (130, "", "error: interrupted by SIGINT\n")),
        ("taken", "3", (130, "", "error on rank 3: interrupted by SIGINT\n")),
        ("ignored", "0", (0, "it went on\n", "")),
    ],
)
def test_sigint_in_a_block_that_holds_nothing_ends_there_and_then(kind: str, rank: str, ended: tuple[int, str, str]):
    command, environment = [sys.executable, "-c", LEAVES, kind], os.environ | {"RANK": rank}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == ended


def test_after_the_block_sigint_means_what_it_did_and_other_threads_set_no_handler():
    before, seen = signal.getsignal(signal.SIGINT), []
    with LeavingAtOnce():
        inside = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=lambda: seen.append(LeavingAtOnce().__enter__()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGINT) is before
    assert (inside is not before) == (before is signal.default_int_handler)


def test_a_rank_is_named_where_it_is_not_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    assert line("no") == "error: no"
    monkeypatch.setenv("RANK", "2")
    assert line("no") == "error on rank 2: no"


def test_it_imports_little():
    """What is imported before it is a moment in which SIGINT is a traceback."""
    program = "import sys; before = set(sys.modules); import megatron.lm.pretrain; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert not {"re", "typing", "json", "torch", "contextlib", "megatron.lm.shell.exit_codes"} & set(done.stdout.split())
