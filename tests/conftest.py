"""Where tests run: on the CPU (Triton kernels under the interpreter), and, marked `gpu`, on a GPU with FP8."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Triton reads this when it is first imported, and kernels are made for one or the other when their file is.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU with FP8 (compute capability 8.9 or later)")
    for item in items:
        if "gpu" in item.keywords or "multi_gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU in tests marked `gpu`."""
    return torch.device(request.param)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where a Triton kernel runs: the CPU under the interpreter, and a GPU in tests marked `gpu`."""
    pytest.importorskip("triton")
    if (request.param == "interpreter") != _interpreting():
        pytest.skip(
            "Triton is set to compile; TRITON_INTERPRET=1 interprets" if request.param == "interpreter" else "TRITON_INTERPRET=1 is set"
        )
    return torch.device("cpu" if request.param == "interpreter" else "cuda")
