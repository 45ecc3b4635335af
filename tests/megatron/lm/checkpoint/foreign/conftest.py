"""One job of plain megatron-core for all tests of this folder."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from helpers.megatron_checkpoints import CASES
from helpers.megatron_jobs import job


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by case, which the first of pytest-xdist's workers to ask writes for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "megatron"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            job("write", folder, CASES, 2)
            (folder / "complete").touch()
    return folder
