"""How a command ends: `@entry.command` on its main function, and whatever goes wrong in it is one line on stderr and an exit code.

    0    it has done what was asked
    2    what was asked cannot be: settings, files or data are refused (ValueError, and argparse's usage errors), a package is missing
    1    it had to stop: RunStopped, the system (OSError: disk full, no permission), no memory, another process that is gone
    1    an unforeseen error: the line says that this is a bug, and names a file with the traceback
    130  SIGINT

So a traceback on the screen never stands for something that a user could have done otherwise, and no bug is taken for bad input. The
exceptions' texts are the remedy: what raises a ValueError, an OSError or a RunStopped says the value and what to do. Two kinds of
ValueError are Python's own and name no file, UnicodeError and JSONDecodeError: they are bugs of the code that read the file.
"""

import contextlib
import errno
import functools
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TextIO

from megatron.lm.errors import RunStopped, missing, report
from megatron.lm.shell.interrupt import INTERRUPTED, WORDS, line, reports_signals

REFUSED, STOPPED = 2, 1

_SMALLER = "take a smaller model, batch or sequence, or more processes (--dry-run of megatron.lm.pretrain tells what one holds)"
_OTHER_RANK = "another process of this run is gone, or cannot be reached: its own message says why"
_SYSTEM = {
    errno.ENOSPC: "free space there, or name another place",
    errno.EDQUOT: "free space there, or name another place",
    errno.EFBIG: "free space there, or name another place",
    errno.EACCES: "change its permissions, or name another",
    errno.EPERM: "change its permissions, or name another",
    errno.EROFS: "name another place",
    errno.ENOENT: "name one that exists",
    errno.ENOTDIR: "name another",
    errno.EISDIR: "name a file in it",
    errno.EEXIST: "name another, or remove it",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.EMFILE: "allow more open files with `ulimit -n`",
    errno.ENOMEM: _SMALLER,
}

P = ParamSpec("P")


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Decorator of a command's main function, which returns an exit code (None is 0): it raises nothing but SystemExit (argparse).

    What could not be written to stdout ends it with 1. A reader of stdout that leaves (`| head`) ends it with 1 without a word.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        # Packages that megatron-core can do without: it says at every import that it does.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer.Engine)", module=r"(?!megatron\.lm|msamp)")
        try:
            check_package()
            code = main(*args, **kwargs) or 0
            flush_or_close(sys.stdout)
            return code
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is leaving
            return _tell(WORDS, INTERRUPTED) if reports_signals() else INTERRUPTED
        except Exception as error:
            code = _ends(error)
            with contextlib.suppress(OSError):
                flush_or_close(sys.stdout)
            return code

    return guarded


def leave_at_once(error: Exception, after: float) -> NoReturn:
    """Say what ended this process, and end it without unwinding, which would wait for collectives that the others never join.

    Args:
        error: as of a `command`'s main function.
        after: seconds for which the process stays, so that the others hear of the error before its connections break.
    """
    code = _ends(error)
    with contextlib.suppress(OSError):
        flush_or_close(sys.stdout)
    time.sleep(after)
    os._exit(code)


def check_package() -> None:
    """What `msamp.integrations.ms_amp.check_alone` says, without an import of msamp, which may not be ours.

    Raises:
        ValueError: `import msamp` finds another package, or what another one has left of ours.
    """
    found = importlib.util.find_spec("msamp")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    file = next((path for path in (Path(folder, "integrations", "ms_amp.py") for folder in folders) if path.is_file()), None)
    if file is None:
        raise ValueError(
            f"import msamp finds {folders[0] if folders else 'nothing'}, which is not the msamp of this trainer: pip uninstall ms-amp "
            "msamp, then install msamp, or mend PYTHONPATH"
        )
    spec = importlib.util.spec_from_file_location("ms_amp", file)
    assert spec is not None
    assert spec.loader is not None
    ms_amp = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ms_amp)
    ms_amp.check_alone()


def _ends(error: Exception) -> int:
    """Say what ended a command; its exit code."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError | json.JSONDecodeError):
        return _tell(str(error), REFUSED)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(("megatron.lm", "msamp")):
        return _tell(missing(error.name), REFUSED)
    if isinstance(error, RunStopped):
        return _tell(str(error), STOPPED)
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return STOPPED
    if isinstance(error, OSError):
        return _tell(_of_system(error), STOPPED)
    if _lacks_memory(error):
        return _tell(f"out of memory ({_first_line(error)}): {_SMALLER}", STOPPED)
    if lost_connection(error):
        return _tell(f"{_first_line(error)}: {_OTHER_RANK}", STOPPED)
    what = f"{type(error).__name__}: {_first_line(error)}"
    return _tell(f"this is a bug of the program, please report it ({what})", STOPPED, f"; {_kept(error)}")


def _tell(message: str, code: int, beside: str = "") -> int:
    """`beside`: what only this process has to say."""
    report(line(message + beside), message)
    return code


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _of_system(error: OSError) -> str:
    """The system's word, with the file and what to do; an OSError of this project's own has a text and no number."""
    if error.errno is None or error.strerror is None:
        return _first_line(error)
    names = " -> ".join(os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in (error.filename, error.filename2) if name)
    remedy = _SYSTEM.get(error.errno)
    return (f"{names}: " if names else "") + error.strerror + (f": {remedy}" if remedy else "")


def _lacks_memory(error: Exception) -> bool:
    # torch is asked for no type: a command that never imported it is not to wait for it now.
    named = type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error) or "not enough memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and named)


def lost_connection(error: Exception) -> bool:
    """Whether it is torch.distributed's word for a process that does not answer: DistError, and what gloo leaves a RuntimeError."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("/gloo/", "onnection closed by peer", "does not answer"))


def _kept(error: Exception) -> str:
    """Put the traceback into a file of the folder for temporary ones; where it is, as words."""
    text = "".join(traceback.format_exception(error))
    torch = sys.modules.get("torch")
    versions = f"python {platform.python_version()}, torch {getattr(torch, '__version__', 'not imported')}, {platform.platform()}"
    try:
        handle, path = tempfile.mkstemp(prefix="msamp-bug-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{' '.join(map(repr, sys.argv))}\n{versions}\n\n{text}")
    except OSError:
        return f"its traceback could not be written to a file:\n{text}"
    return f"the traceback is in {path}"


def flush_or_close(stream: TextIO) -> None:
    """Flush; OSError where that fails. The process's own stdout is nowhere then: the interpreter, which flushes it at its end, would
    complain of the same again."""
    try:
        stream.flush()
    except OSError:
        if stream is sys.__stdout__:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        raise
