"""Commands that are started with an interpreter without torch name it, in a line, and exit with 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("module", ["megatron.lm.pretrain", "megatron.lm.tools.convert_checkpoint", "megatron.lm.tools.preprocess_data"])
def test_the_interpreter_is_named(module: str):
    """Before, a traceback, or the report of a bug."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys._base_executable, "-S", "-m", module, "--help"]  # type: ignore[attr-defined]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {sys._base_executable} has no torch: activate the environment")  # type: ignore[attr-defined]
    assert done.stderr.count("\n") == 1
