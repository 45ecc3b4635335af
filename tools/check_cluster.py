"""Starts `python -m megatron.lm.tools.check_cluster`."""

from megatron.lm.tools.check_cluster import main

if __name__ == "__main__":
    raise SystemExit(main())
