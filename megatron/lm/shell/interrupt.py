"""SIGINT while a program is still importing: one line and exit code 130, as `megatron.lm.shell.exit_codes` has them.

Imports nothing but os and signal, so that it can come before everything else: `LeavingAtOnce` is there some milliseconds after the
interpreter, which tells of a SIGINT in its own way until then.
"""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT
WORDS = "interrupted by SIGINT"


class LeavingAtOnce:
    """A SIGINT while the block runs ends the process there and then.

    For blocks that import. A KeyboardInterrupt in the middle of a compiled module's initialisation, or of a callback of the import system,
    comes out as another error, or as a traceback on stderr. Nothing is unwound: the block holds nothing that would have to be let go.
    Where SIGINT is ignored, as under nohup, or the host has a handler of its own, that stays; so it does in a thread.
    """

    def __enter__(self) -> None:
        self._taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._taken:
            try:
                signal.signal(signal.SIGINT, _leave)
            except ValueError:  # only the main thread may
                self._taken = False

    def __exit__(self, *_: object) -> None:
        if self._taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    try:
        if reports_signals():
            os.write(2, f"{line(WORDS)}\n".encode())  # sys.stderr may be in the middle of a line; and full
    finally:
        os._exit(INTERRUPTED)


def reports_signals() -> bool:
    """Whether this process is the one of its machine that reports a signal; torchrun's processes all get it."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


def line(message: str) -> str:
    """How a command's error is told, with the rank where it is not the first."""
    rank = os.environ.get("RANK", "0")
    return f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}"
