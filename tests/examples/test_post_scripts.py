"""The scripts of examples/sft and examples/rlhf as users start them, and what the makers of models refuse."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shell(script, folder, *flags, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("MODEL", "DATA", "REWARD", "WORLD_SIZE", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "OUT": str(folder)} | variables
    return subprocess.run(["bash", str(ROOT / "examples" / script), *flags], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly(9)
@pytest.mark.parametrize(
    ("script", "flags"),
    [("sft/run.sh", ("--train-iters", "2")), ("rlhf/run.sh", ("--train-iters", "1", "--global-batch-size", "4", "--mini-batch-size", "4"))],
)
def test_a_script_leaves_a_row_a_level_and_does_nothing_twice(tmp_path, script, flags):
    pytest.importorskip("transformers")
    done = shell(script, tmp_path, *flags, LEVELS="O3")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "rows.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["recipe"] for row in rows] == ["O3"]
    assert all(row["commit"] and row["date"] and row["gpu"] for row in rows)
    assert (tmp_path / "O3/model/config.json").is_file()
    again = shell(script, tmp_path, *flags, LEVELS="O3")
    assert (again.returncode, again.stdout.split()) == (0, ["O3"])
