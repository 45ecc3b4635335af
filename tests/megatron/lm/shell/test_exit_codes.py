"""How a command ends: every kind of failure as one line and a code, and the traceback of what nobody foresaw."""

import argparse
import contextlib
import errno
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.lm.command import dispatch
from megatron.lm.errors import RunStopped
from megatron.lm.shell import arguments, exit_codes

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT means afterwards what it did before."""
    monkeypatch.delenv("RANK", raising=False)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def ended(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    @exit_codes.command
    def main() -> int:
        raise error

    code = main()
    said = capsys.readouterr()
    assert said.out == ""
    return code, said.err


FORESEEN = {
    "refused": (ValueError("--lr 0: give more"), 2, "error: --lr 0: give more\n"),
    "stopped": (RunStopped("20 steps were skipped: lower --lr"), 1, "error: 20 steps were skipped: lower --lr\n"),
    "disk": (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "error: a/b: No space left on device: .*\n"),
    "two files": (PermissionError(errno.EACCES, "Permission denied", "a", None, b"b"), 1, "error: a -> b: Permission denied: .*\n"),
    "own words": (
        ConnectionError("nobody listens at MASTER_ADDR: start rank 0"),
        1,
        "error: nobody listens at MASTER_ADDR: start rank 0\n",
    ),
    "memory": (MemoryError(), 1, r"error: out of memory \(MemoryError\): use a smaller model.*--dry-run.*\n"),
    "GPU memory": (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 1, r"error: out of memory \(CUDA out of memory\.\): use .*\n"),
    "GPU memory of a graph": (RuntimeError("CUDA error: out of memory\nSearch"), 1, r"error: out of memory \(CUDA error.*\): use .*\n"),
    "CPU memory": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "error: out of memory .*\n"),
    "store": (torch.distributed.DistNetworkError("refused\nstack"), 1, "error: refused: another process of this run has ended .*\n"),
    "gloo": (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), 1, "error: .*another process of this run.*\n"),
    "MS-AMP": (ImportError("no formats", name="msamp.numerics"), 2, "error: .*pip uninstall ms-amp msamp.*\n"),
    "SIGINT": (KeyboardInterrupt(), 130, "error: interrupted by SIGINT\n"),
}


@pytest.mark.promise("Starting and ending", "A failing command prints one line and exits with 2 (refused), 1 (stopped) or 130 (SIGINT).")
@pytest.mark.parametrize("kind", FORESEEN)
def test_what_was_foreseen_is_one_line_and_a_code(kind: str, capsys: pytest.CaptureFixture[str]):
    error, code, line = FORESEEN[kind]
    found, said = ended(error, capsys)
    assert found == code
    assert re.fullmatch(line, said), said


BUGS = [
    KeyError("grad"),
    RuntimeError("shape '[3]' is invalid\nfor input"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    json.JSONDecodeError("Expecting value", "", 0),
]


@pytest.mark.promise("Starting and ending", "An unexpected error is reported as a bug, with its traceback.")
@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
def test_what_nobody_foresaw_is_called_a_bug_and_has_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]):
    code, said = ended(error, capsys)
    assert code == 1
    what = str(error).partition("\n")[0]
    assert said.startswith(f"error: this is a bug of the program, please report it ({type(error).__name__}: {what})")
    assert "Traceback (most recent call last)" in said


@pytest.mark.parametrize(("variables", "said"), [({}, "error: no\n"), ({"RANK": "3"}, "error on rank 3: no\n")])
def test_a_rank_says_which_it_is(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ended(ValueError("no"), capsys) == (2, said)


@pytest.mark.parametrize(("local", "said"), [("0", "error: no\n"), ("1", "")])
def test_under_torchrun_one_process_of_a_machine_prints_and_all_leave_their_error(
    local: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", local)
    assert ended(ValueError("no"), capsys) == (2, said)
    assert json.loads(file.read_text(encoding="utf-8"))["message"]["message"] == "no"


def test_what_ends_well_ends_as_it_says(capsys: pytest.CaptureFixture[str]):
    @exit_codes.command
    def main(argv: list[str] | None = None) -> int | None:
        """What it does."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--code", type=int)
        return parser.parse_args(argv).code

    assert main([]) == 0
    assert main(["--code", "7"]) == 7
    assert main.__doc__ == "What it does."
    with pytest.raises(SystemExit) as leaving:
        main(["--cod"])
    assert leaving.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# Values that cannot serve are refused while the command line is read.


@pytest.mark.promise("Tools", "An empty path, or an output that cannot be written, is refused before the work.")
@pytest.mark.parametrize(
    ("judge", "text", "message"),
    [
        (arguments.path, "", "empty"),
        (arguments.output_file, " ", "empty"),
        (arguments.output_file, "/", "folder"),
        (arguments.output_file, "/dev/null/x/y", "/dev/null"),
        (arguments.output_file, "/proc/self/x", "below /proc/self, which is a file or cannot be written"),
        (arguments.output_file, "x" * 300, "cannot be written"),
        (arguments.count(0), "-1", "-1"),
        (arguments.count(1, 8), "9", "9"),
        (arguments.count(1), "1.5", "1.5"),
    ],
)
def test_a_value_that_cannot_serve_is_refused_before_the_work(judge, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        judge(text)


@pytest.mark.promise("Tools", "A refused tool call is one line with value and fix, and exit code 2.")
def test_errors_are_one_line(capsys):
    parser = arguments.Parser(description="A tool.\n\n    python tool.py")
    parser.add_argument("--runs", type=arguments.count(1))
    with pytest.raises(SystemExit) as leaving:
        parser.parse_args(["--runs", "0"])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "--runs" in said
    assert said.count("\n") == 1
    assert "A tool.\n\n    python tool.py" in parser.format_help()


def test_a_path_that_can_serve_is_taken(tmp_path):
    assert arguments.output_file(f"{tmp_path}/new/rows.csv") == tmp_path / "new" / "rows.csv"
    assert not list(tmp_path.iterdir())
    assert arguments.count(2)("2") == 2


@pytest.mark.parametrize("tool", ["compare", "report", "inspect", "evaluate"])
def test_control_characters_of_files_are_shown_as_escapes(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "a\x1b]0;b\x07\udc80"
    folder.mkdir()
    (folder / "m.jsonl").write_text('{"kind": "train\\u001b[2J"}\n')
    name = str(folder / "m.jsonl")
    flags = {"compare": [f"a={name}", f"b={name}"], "report": [f"a={name}", "--out", str(tmp_path / "out")]}
    flags |= {"inspect": [name], "evaluate": [name, "--text", name]}
    with contextlib.suppress(SystemExit):
        dispatch.main([tool, *flags[tool]])
    shown = "".join(capsys.readouterr())
    assert all(escape in shown for escape in ("\\x1b", "\\udc80"))
    assert not set(shown) & {"\x1b", "\x07"}
