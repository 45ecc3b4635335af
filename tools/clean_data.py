"""Starts `python -m megatron.lm.tools.clean_data`."""

from megatron.lm.tools.clean_data import main

if __name__ == "__main__":
    raise SystemExit(main())
