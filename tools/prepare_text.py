"""Starts `python -m megatron.lm.tools.prepare_text`."""

from megatron.lm.tools.prepare_text import main

if __name__ == "__main__":
    raise SystemExit(main())
