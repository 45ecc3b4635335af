"""Starts `python -m megatron.lm.tools.convert_checkpoint`."""

from megatron.lm.tools.convert_checkpoint import main

if __name__ == "__main__":
    raise SystemExit(main())
