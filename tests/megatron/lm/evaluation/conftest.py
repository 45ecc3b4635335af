"""Checkpoints and exports that several files evaluate."""

from pathlib import Path

import pytest

from helpers import texts
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.tools import convert_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoints at fp32 and O3, and the former's export to Hugging Face, the latter's in two FP8 layouts."""
    folder = tmp_path_factory.mktemp("evaluated")
    fp32, o3 = (texts.trained(folder, precision=level) for level in ("fp32", "O3"))
    with cpu_home():
        assert convert_checkpoint.main(["to-hf", "--load", str(fp32), "--output", str(folder / "hf"), "--dtype", "float32"]) == 0
        assert convert_checkpoint.main(["export-fp8", "--load", str(o3), "--output", str(folder / "fp8")]) == 0
        blocks = ["--layout", "deepseek", "--output", str(folder / "blocks")]
        assert convert_checkpoint.main(["export-fp8", "--load", str(o3), *blocks]) == 0
    return {"fp32": fp32, "O3": o3, "hf": folder / "hf", "fp8": folder / "fp8", "blocks": folder / "blocks"}
