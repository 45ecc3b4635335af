"""The tiny dataset that the trainer's tests run on, and a process for whole commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import tiny
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands start as one process that no launcher has set up, and leave no process group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with cpu_home():
        yield
        process_groups.shutdown()
