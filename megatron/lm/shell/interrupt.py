"""Handle SIGINT while a program imports: print one line and exit with code 130, like `megatron.lm.shell.exit_codes`.

This module imports only os and signal, so that it can come first: `LeavingAtOnce` is active some milliseconds after the interpreter starts.
Before that, Python prints its own traceback.
"""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT
WORDS = "interrupted by SIGINT"


class LeavingAtOnce:
    """Exit the process at once on SIGINT inside the block, without unwinding.

    Use it for blocks of imports. A KeyboardInterrupt during the initialization of a compiled module, or in a callback of the import system,
    turns into another error or a traceback on stderr. If SIGINT is ignored, as under nohup, or has a handler, or in a thread, the block
    changes nothing.
    """

    def __enter__(self) -> None:
        self._taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._taken:
            try:
                signal.signal(signal.SIGINT, _leave)
            except ValueError:  # only the main thread may set handlers
                self._taken = False

    def __exit__(self, *_: object) -> None:
        if self._taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    try:
        if reports_signals():
            os.write(2, f"{line(WORDS)}\n".encode())  # sys.stderr may be locked, and its disk full
    finally:
        os._exit(INTERRUPTED)


def reports_signals() -> bool:
    """Return whether this process reports a signal for its machine, since all processes of torchrun get it."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"


def line(message: str) -> str:
    """Return the error line of a command, with the rank unless it is 0."""
    rank = os.environ.get("RANK", "0")
    return f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}"
