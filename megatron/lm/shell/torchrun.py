"""torchrun with one error line instead of a traceback: `msamp torchrun --nproc-per-node 8 msamp pretrain ...`.

It has torchrun's flags, and runs one of our commands where torchrun has a script. When a process fails, torchrun prints about 35 lines
with the traceback of its own ChildFailedError, and exits with 1 whatever the exit code of the process. Here the error that came first is
printed in a line, and the exit code of its process is returned. If the process reported none, because a signal ended it or it is not one
of our commands, a line names its rank.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.lm.shell.exit_codes import command

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# If one of several torchruns at an endpoint is lost and restarted, the others keep the address of the store that they shared with their
# processes, the new one creates another, and the processes never meet. With this setting each start has its own store.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; return the exit code of the first process that failed (128 + signal number if a signal ended it), or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The first two loggers repeat the failure that is reported here; the last one explains OMP_NUM_THREADS=1 in six lines.
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").addFilter(lambda entry: "OMP_NUM_THREADS" not in entry.getMessage())
    words = list(sys.argv[1:] if argv is None else argv)
    number = re.search(r"--nproc[-_]per[-_]node[= ]([-+]?\d+)", " ".join(words))
    if number is not None and int(number[1]) < 1:
        raise ValueError(f"--nproc-per-node is {number[1]}; it must be at least 1, the number of processes on this machine")
    if any(word.startswith(("--rdzv-endpoint", "--rdzv_endpoint")) for word in words):
        os.environ.setdefault(OWN_STORE, "1")
    asked = parse_args(words)
    if asked.training_script == "msamp":  # a name on PATH, which another interpreter may have put there
        asked.module, asked.training_script = True, "megatron.lm.command.dispatch"
    try:
        run(asked)
    except ChildFailedError as error:
        explained = {rank: failure for rank, failure in error.failures.items() if os.path.isfile(failure.error_file)}
        rank, failure = min((explained or error.failures).items(), key=lambda item: item[1].timestamp)
        code = failure.exitcode
        if explained:
            first = next((_message(one) for one in explained.values() if one.local_rank == 0), "")  # this one was printed
            numbers_and_paths = r"\S*[\d/]\S*"  # which differ from process to process
            if re.sub(numbers_and_paths, "", first) != re.sub(numbers_and_paths, "", _message(failure)):
                print(f"error on rank {rank}: {_message(failure)}", file=sys.stderr, flush=True)
        else:
            ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"error: rank {rank} {ending}; its own message, if it left one, is above", file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code
    except SignalException as error:
        print(f"error: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    return 0


def _message(failure: "ProcessFailure") -> str:
    """Return the error that a process wrote to its file (`megatron.lm.errors.report`, or torch's `record`)."""
    return failure.message["message"] if isinstance(failure.message, dict) else str(failure.message)


if __name__ == "__main__":
    sys.exit(main())
