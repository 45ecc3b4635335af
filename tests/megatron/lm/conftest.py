"""The tiny dataset that the trainer's tests run on."""

from pathlib import Path

import pytest
import torch

from helpers import tiny


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `--data-path` takes."""
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def gloo_prefix(prefix: Path) -> Path:
    """The same, for runs over several processes of this machine."""
    if torch.cuda.is_available():
        pytest.skip("several processes on one GPU")
    return prefix
