"""The asserts of test files, rewritten once for all processes of a run.

pytest rewrites the asserts of a test file when it first imports it, and keeps the result in `__pycache__`. The processes of pytest-xdist
import all files at the same time in the same order. From a clean checkout each therefore rewrote nearly all of them: 13 s of CPU time per
process for 630 files. Here each process first rewrites its part of the files, and then finds those of the others.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def part(config: pytest.Config, root: Path) -> list[Path]:
    """Every n-th test file below `root`, of this one of n processes; none where one process runs all."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return []
    return sorted(root.rglob("test_*.py"))[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]


def keep(files: Iterable[Path], config: pytest.Config) -> None:
    """Write what pytest keeps of each file, unless it is there already or nothing is to be written."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, kept, state.trace) is None and rewrite.try_makedirs(folder):
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, kept)
