"""Exit codes: the decorator `command` turns every exception of a main function into one line on stderr and an exit code.

    0    success
    2    invalid settings, files or data (ValueError, and argparse's usage errors), or a missing package
    1    the command had to stop: RunStopped, the system (OSError: disk full, no permission), out of memory, a lost process
    1    an unexpected error: the line reports a bug, and its traceback follows
    130  SIGINT

So users see no traceback for their own mistakes, and bugs do not look like bad input. Exceptions contain the fix: code that raises a
ValueError, an OSError or a RunStopped reports the value and what to do. Python's own UnicodeError and JSONDecodeError are ValueErrors
without a file name; they count as bugs of the code that read the file.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TextIO

from megatron.lm.errors import RunStopped, missing, report

REFUSED, STOPPED, INTERRUPTED = 2, 1, 128 + signal.SIGINT
SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)  # schedulers send one of these before a limit

_SMALLER = "use a smaller model, batch or sequence, or more processes (--dry-run of msamp pretrain prints the memory of each)"
_OTHER_RANK = "another process of this run has ended or cannot be reached: see its own error message"
P = ParamSpec("P")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _Shown:
    """A text stream that shows as escapes what its encoding lacks, and control characters, which could clear a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        return self._stream.write(text.translate(_CONTROLS).encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Decorate a command's main function, which returns an exit code (None is 0), to raise nothing but SystemExit (from argparse)."""

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        # megatron-core warns at every import about optional packages that are not installed.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer.Engine)", module=r"(?!megatron\.lm|msamp)")
        with contextlib.redirect_stdout(_shown(sys.stdout)), contextlib.redirect_stderr(_shown(sys.stderr)):
            try:
                return main(*args, **kwargs) or 0
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # only cleanup is left
                return _print("interrupted by SIGINT", INTERRUPTED)
            except Exception as error:
                return _ends(error)

    return guarded


def _shown(stream: Any) -> Any:
    return stream if isinstance(stream, _Shown) else _Shown(stream)  # a command may call another


def leave_at_once(error: Exception) -> NoReturn:
    """Report an error and exit without unwinding, which would wait for collectives that the other processes never join."""
    code = _ends(error)
    sys.stdout.flush()
    os._exit(code)


def _ends(error: Exception) -> int:
    """Report an error and return its exit code."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError | json.JSONDecodeError):
        return _print(str(error), REFUSED)
    installed = {distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()}
    if isinstance(error, ImportError) and ((error.name or "").startswith("msamp") or "ms-amp" in installed):
        # Microsoft's package of the same import name, installed later in the same folder or uninstalled there, takes files along.
        return _print(f"{error}: pip uninstall ms-amp msamp, then install msamp again", REFUSED)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("megatron.lm"):
        return _print(missing(error.name), REFUSED)
    if isinstance(error, RunStopped):
        return _print(str(error), STOPPED)
    if isinstance(error, OSError):
        if error.errno is None or error.strerror is None:  # an OSError of this project has a text and no errno
            return _print(_first_line(error), STOPPED)
        names = [os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in (error.filename, error.filename2) if name]
        fix = ": check its permissions and the free space, or choose another path" if names else ""
        return _print(f"{': '.join([*filter(None, [' -> '.join(names)]), error.strerror])}{fix}", STOPPED)
    if lacks_memory(error):
        return _print(f"out of memory ({_first_line(error)}): {_SMALLER}", STOPPED)
    if lost_connection(error):
        return _print(f"{_first_line(error)}: {_OTHER_RANK}", STOPPED)
    what = f"{type(error).__name__}: {_first_line(error)}"
    traced = "".join(traceback.format_exception(error))
    return _print(f"this is a bug of the program, please report it ({what}) with this traceback:\n{traced}", STOPPED)


def _print(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    report(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", message)
    return code


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error means that memory could not be allocated, on the host or a device."""
    # By the text: CUDA's own error, such as that of making a graph, has no type, and torch is not imported for the others'.
    named = any(words in str(error) for words in ("out of memory", "allocate memory", "not enough memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and named)


def lost_connection(error: Exception) -> bool:
    """Return whether the error means that another process does not respond: torch's DistError, or gloo's RuntimeErrors."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("/gloo/", "onnection closed by peer", "does not answer"))


@contextlib.contextmanager
def one_line(message: str) -> Iterator[None]:
    """Convert an error of a library that reads a file from elsewhere to a ValueError of one line, except an out-of-memory error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Refused):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if lacks_memory(error):
            raise
        text = " ".join(str(error).split())
        raise ValueError(f"{message} ({type(error).__name__}: {text[:300]})") from None


class Refused(ValueError):
    """A refusal of this project inside a block of `one_line`, which keeps its message."""
