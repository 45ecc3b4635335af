"""Starts `python -m megatron.lm.tools.generate`."""

from megatron.lm.tools.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
