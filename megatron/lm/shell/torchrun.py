"""torchrun, with a line where it would leave a traceback: `python -m megatron.lm.shell.torchrun --nproc-per-node 8 -m PROGRAM`.

It takes torchrun's flags. When one of its processes fails torchrun ends with the traceback of its own ChildFailedError and with 1, whatever
the process ended with; that has said what is wrong, so here follows one line that names it, and its exit code.
"""

import os
import signal
import sys
from collections.abc import Sequence

from megatron.lm.shell.exit_codes import command
from megatron.lm.shell.interrupt import LeavingAtOnce

# Of several torchruns that meet at an endpoint one may be lost and come back. Those that stayed keep the address of the store that they
# shared with their processes, the new one makes another, and the processes never meet. With this each start has a store of its own.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; the exit code of the first process that failed (128 + its number where a signal ended it), or 0."""
    with LeavingAtOnce():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.startswith(("--rdzv-endpoint", "--rdzv_endpoint")) for word in words):
        os.environ.setdefault(OWN_STORE, "1")
    try:
        torchrun(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"error: rank {rank} {how}; what it said stands above", file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code
    except SignalException as error:
        print(f"error: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
