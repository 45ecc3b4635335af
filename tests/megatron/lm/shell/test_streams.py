"""Print under any encoding and without any stream. Whole runs are in tests/attack/test_streams.py."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.lm.shell.streams import printable

ROOT = Path(__file__).parents[4]
SCRIPT = r"""
import os, sys
from megatron.lm.shell import exit_codes
@exit_codes.command
def main():
    print("\xfc", os.fsdecode(b"\xff"), "\xb1")
    with open(sys.argv[1], "w") as stream:
        print(stream.fileno() > 2, file=sys.stderr)
    if len(sys.argv) > 2:
        raise ValueError("odd \xfc")
sys.exit(main())
"""
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(tmp_path: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", f'"$@" {shell}', "-", sys.executable, "-c", SCRIPT, str(tmp_path / "file")]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("environment", "out"),
    [
        ({"PYTHONIOENCODING": "ascii"}, rb"\xfc \udcff \xb1"),
        ({"PYTHONIOENCODING": "latin-1"}, b"\xfc \\udcff \xb1"),
        ({"PYTHONIOENCODING": "utf-8"}, "ü \\udcff ±".encode()),
        ({"PYTHONIOENCODING": "utf-8:surrogateescape"}, "ü ".encode() + b"\xff" + " ±".encode()),
        (C, rb"\xfc " + b"\xff" + rb" \xb1"),
    ],
)
def test_what_an_encoding_lacks_is_escaped(tmp_path: Path, environment: dict[str, str], out: bytes):
    done = run(tmp_path, "", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, out + b"\n", b"True\n")


@pytest.mark.parametrize(
    ("shell", "err"), [(">&-", ["warning: stdout is closed: what this command prints there is lost", "True"]), (">&- 2>&-", [])]
)
def test_a_closed_stream_gives_its_number_to_no_file(tmp_path: Path, shell: str, err: list[str]):
    done = run(tmp_path, shell)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()) == (0, "", err)
    assert (tmp_path / "file").read_text() == ""


def test_an_error_without_stderr_keeps_its_code(tmp_path: Path):
    assert run(tmp_path, "refuse 2>&-").returncode == 2
    assert run(tmp_path, "refuse >&- 2>&-").returncode == 2


def test_streams_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))
    with printable():
        print("ü")
    assert sys.stdout.errors == "strict"
    assert held.getvalue() == b"\\xfc\n"
    with pytest.raises(UnicodeEncodeError):
        print("ü")
    monkeypatch.setattr(sys, "stdout", None)
    with printable():
        print("lost")
    assert sys.stdout is None


def test_other_streams_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with printable():
        print("ü")
    assert sys.stdout.getvalue() == "ü\n"
