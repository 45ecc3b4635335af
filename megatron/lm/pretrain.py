"""Entry point: `python -m megatron.lm.pretrain ...`, by itself or under torchrun."""

import sys

from megatron.lm.shell.interrupt import LeavingAtOnce


def main(argv: list[str] | None = None) -> int:
    """Train as the flags say. Returns the exit code, as `entry` has them; of a run that was asked to leave `--exit-code-unfinished`."""
    with LeavingAtOnce():
        from megatron.lm.run.job import job  # all else
    return job(argv)


if __name__ == "__main__":
    sys.exit(main())
