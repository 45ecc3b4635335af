"""Starts `python -m megatron.lm.tools.evaluate`."""

from megatron.lm.tools.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
