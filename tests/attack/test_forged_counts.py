"""Numbers behind a valid seal that no run writes: each reader refuses them in one line."""

import json
from pathlib import Path

import pytest
import torch

from helpers import checkpoints
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.tools import convert_checkpoint

NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def folder(prefix: Path, tmp_path: Path) -> Path:
    return checkpoints.saved(prefix, tmp_path / "saved", opt_level="O2") / "iter_0000004"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 5.0])
def test_a_step_counter(folder: Path, tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]):
    checkpoints.rewrite(folder, {f"step/{NORM}": torch.tensor(value)})
    assert convert_checkpoint.main(["to-megatron", "--load", str(folder), "--output", str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err
    assert f"step/{NORM}" in err.splitlines()[-1]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("precision", "fp8_amax_history_len", 2**40),
        ("model", "num_layers", 10**9),
        ("model", "hidden_size", 2**50),
        ("precision", "fp8_margin", -1),
    ],
)
def test_a_number_of_the_configuration(prefix: Path, folder: Path, section: str, name: str, value: int, capsys: pytest.CaptureFixture[str]):
    info = read_info(folder)
    info["config"][section][name] = value
    checkpoints.seal(folder, info)
    said = f"has --{name.replace('_', '-')} {value}; it must be in "
    for command in (["inspect"], ["to-megatron", "--output", str(folder.parent / "o")]):
        assert convert_checkpoint.main([*command, "--load", str(folder)]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ValueError, match=said):
        checkpoints.resume(prefix, folder.parent)
    assert json.loads((folder / "checkpoint.json").read_text())["config"][section][name] == value
