"""Starts `python -m megatron.lm.tools.loss_compare`."""

from megatron.lm.tools.loss_compare import main

if __name__ == "__main__":
    raise SystemExit(main())
