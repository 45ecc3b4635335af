"""One job of plain megatron-core for all tests of this folder."""

from pathlib import Path

import pytest

from helpers.megatron_checkpoints import CASES
from helpers.megatron_jobs import job


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by case."""
    folder = tmp_path_factory.mktemp("megatron")
    job("write", folder, CASES, 2)
    return folder
