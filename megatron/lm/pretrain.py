"""Entry point: `msamp pretrain ...`, by itself or under torchrun."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run training with these flags and return the exit code of `entry`, or `--exit-code-unfinished` if the run was stopped early."""
    try:
        from megatron.lm.run.job import job
    except KeyboardInterrupt:  # imports take seconds
        print("error: interrupted by SIGINT", file=sys.stderr)
        return 130

    return job(argv)


if __name__ == "__main__":
    sys.exit(main())
