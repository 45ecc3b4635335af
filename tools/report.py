"""Starts `python -m megatron.lm.tools.report`."""

from megatron.lm.tools.report import main

if __name__ == "__main__":
    raise SystemExit(main())
