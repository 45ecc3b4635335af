"""A run whose stdout cannot encode its paths, or is closed, trains to its end and saves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attack.fuzz_files import TRAINER

from helpers import tiny
from helpers.megatron_jobs import UNCOMPILED
from megatron.lm.checkpoint.files.folder import marked_iteration

ROOT = Path(__file__).parents[2]
CASES = {
    "ascii": ("", {"PYTHONIOENCODING": "ascii"}),
    "locale C": ("", {"LC_ALL": "C"}),
    "closed": (">&-", {}),
    "both closed": (">&- 2>&-", {}),
}
NIGHTLY = pytest.mark.nightly(10)  # tests/megatron/lm/shell/test_streams.py has them without a run


@pytest.mark.promise("Starting and ending", "A stdout that is closed, or cannot encode a path, costs no run.")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["both closed", *(pytest.param(name, marks=NIGHTLY) for name in CASES if name != "both closed")])
def test_a_run_with_an_odd_stdout(tmp_path: Path, name: str):
    shell, environment = CASES[name]
    tiny.write_data(tmp_path)
    flags = [*TRAINER.split(), "--save", "größe ±", "--metrics-file", "metrics.jsonl"]
    command = ["bash", "-c", f'"$@" {shell}', "-", sys.executable, "-m", "megatron.lm.pretrain", *flags]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | UNCOMPILED | environment
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, errors="replace", timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "this is a bug" not in done.stderr
    assert ("saved " in done.stdout) == (not shell)
    assert marked_iteration(tmp_path / "größe ±") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") > 1
