"""Data that the attacks of a module share."""

from pathlib import Path

import pytest

from helpers import tiny


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--data-path` takes."""
    return tiny.write_data(tmp_path_factory.mktemp("data"))
