"""Starts `python -m megatron.lm.tools.inspect_scales`."""

from megatron.lm.tools.inspect_scales import main

if __name__ == "__main__":
    raise SystemExit(main())
