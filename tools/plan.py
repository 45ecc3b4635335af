"""Starts `python -m megatron.lm.tools.plan`."""

from megatron.lm.tools.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
