"""The trainers and model libraries of others, for tests: a test asks for its host by name, and is skipped where that is not installed.

    transformers = hosts.need("transformers")

`make test-hosts` installs them and sets REQUIRE_HOSTS: a test that would be skipped fails there. What the extras `eval` and `wandb`
bring is asked for with the extra's name, and `make test-extras` installs it. Both leave out what `make test` has run: tests that need no
host, or only transformers, which the extra `dev` brings.
"""

import importlib
import inspect
import os
import re
from types import ModuleType
from typing import NoReturn

import pytest
import torch

# What torchvision registers for at import, and only its compiled file defines. The build on PyPI is for CUDA: beside a CPU build of
# torch that file does not load, and then neither does torchvision, nor timm nor transformers, which import it. No model here calls one.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


_EXTRA = re.compile(r'hosts\.need\((?!"transformers"\))')


def asks_for_an_extra(item: pytest.Item) -> bool:
    """Whether a test, or its file at the top level, asks for a package of an extra other than `dev`: `make test` skips it."""
    function = getattr(item, "function", None)
    if function is None:
        return False
    lines = inspect.getsource(inspect.getmodule(function)).splitlines()
    return bool(_EXTRA.search(inspect.getsource(function))) or any(_EXTRA.search(line) for line in lines if not line[:1].isspace())


def need(name: str, extra: str = "integrations") -> ModuleType:
    """The module of a host. Where it is not installed the test is skipped, or fails if REQUIRE_HOSTS is 1 in the environment."""
    _torchvision()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        target = "test-hosts" if extra == "integrations" else "test-extras"
        lacks(f"needs {name} ({error}): pip install -e '.[{extra}]', or make {target}")


def lacks(reason: str) -> NoReturn:
    """Skip a test, or a file, for this reason; fail it if REQUIRE_HOSTS is 1 in the environment."""
    if os.environ.get("REQUIRE_HOSTS") == "1":
        pytest.fail(f"REQUIRE_HOSTS is 1 and this test {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def _torchvision() -> None:
    """Make torchvision importable beside a torch that its compiled operators do not fit."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for operator in _OPERATORS:
            qualified, schema = operator.split("(", 1)
            torch.library.define(f"torchvision::{qualified}", f"({schema}")
        importlib.import_module("torchvision")
