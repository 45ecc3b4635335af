"""Entry point: `python -m megatron.lm.pretrain ...`, by itself or under torchrun."""

import os
import sys
from collections.abc import Sequence

from megatron.lm.checks import check
from megatron.lm.cli import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Returns the exit code: 2 for settings or data that are refused, with what to do on stderr."""
    config = parse_args(argv)
    try:
        check(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        return _refuse(error)

    # Only now: torch and megatron-core take seconds to import, and a typo should not.
    from megatron.lm import process_groups
    from megatron.lm.trainer import Trainer

    try:
        process_groups.initialize(config)
        try:
            Trainer(config).run()
        finally:
            process_groups.shutdown()
    except ValueError as error:
        return _refuse(error)
    return 0


def _refuse(error: ValueError) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
