"""Weights from elsewhere as a checkpoint: any level takes them, and training starts from them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import tiny
from helpers.checkpoints import LEVELS, MARKER
from megatron.lm.checkpoint import CheckpointReader, save, write_weights
from megatron.lm.checkpoint.content import description
from megatron.lm.config import Config
from megatron.lm.config.cli import config_to_dict


@pytest.fixture(scope="module")
def weights(prefix: Path) -> dict[str, Tensor]:
    with tiny.trainer(tiny.config(prefix, precision="fp32", seed=77)) as made:
        return {name: p.detach().clone() for name, p in made.training.model.named_parameters()}


@pytest.fixture
def config(prefix: Path) -> Config:
    return tiny.config(prefix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_kept_as_they_are(tmp_path: Path, config: Config, weights: dict[str, Tensor], dtype: torch.dtype):
    given = {name: x.to(dtype) for name, x in weights.items()}
    folder = write_weights(tmp_path / "new", description(config_to_dict(config), tiny.VOCABULARY, 1), given)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["iter_0000000", MARKER]
    saved = CheckpointReader(tmp_path / "new")
    assert saved.folder == folder
    assert (saved.info["iteration"], saved.info["consumed_samples"], saved.info["vocab_size"]) == (0, 0, tiny.VOCABULARY)
    assert saved.config == config
    assert sorted(saved.names()) == sorted(given)
    assert all(tiny.same(tiny.bits([saved.weight(name)]), tiny.bits([x])) for name, x in given.items())


@pytest.mark.parametrize("level", [*LEVELS, "coat", "O2 fp32"])
def test_every_level_starts_from_them(prefix: Path, tmp_path: Path, config: Config, weights: dict[str, Tensor], level: str):
    given = {name: x.bfloat16() for name, x in weights.items()}
    write_weights(tmp_path, description(config_to_dict(config), tiny.VOCABULARY, 1), given)
    precision, _, master = level.partition(" ")
    with tiny.trainer(tiny.config(prefix, precision=precision, master_format=master or None, load=str(tmp_path), finetune=True)) as made:
        save(made.training, tmp_path / "taken")
    taken = CheckpointReader(tmp_path / "taken")
    for name, x in given.items():
        torch.testing.assert_close(taken.values(name).bfloat16(), x, rtol=0, atol=1e-6)
    share = [(taken.values(name) != x.float()).float().mean() for name, x in given.items() if "linear" in name and x.dim() == 2]
    assert (0.03 < max(share) < 0.1) == (precision in ("O1", "O2", "O3", "coat")), "masters midway between two codes of FP8 move"


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_before_anything_is_written(tmp_path: Path, config: Config, dtype: torch.dtype):
    said = f"w is {dtype}; weights must be torch.float32, torch.bfloat16 or torch.float16"
    with pytest.raises(ValueError, match=said):
        write_weights(tmp_path / "new", description(config_to_dict(config), tiny.VOCABULARY, 1), {"w": torch.zeros(2).to(dtype)})
    assert not (tmp_path / "new").exists()
