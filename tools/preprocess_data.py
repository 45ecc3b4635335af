"""Starts `python -m megatron.lm.tools.preprocess_data`."""

from megatron.lm.tools.preprocess_data import main

if __name__ == "__main__":
    raise SystemExit(main())
