"""A checkpoint read by tools and for inference: whole tensors, and a model that gives what the trained one gave."""

from pathlib import Path

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import tensors
from megatron.lm.checkpoint import CheckpointReader, latest, load_for_inference
from megatron.lm.processes import process_groups
from msamp.numerics.tensor import ScalingTensor

FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def good(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of iteration 4 of an O3 run, and of iteration 2."""
    return checkpoints.saved(prefix, tmp_path_factory.mktemp("good"), opt_level="O3", save_interval=2)


@pytest.mark.parametrize("level", ["O3", *(pytest.param(level, marks=pytest.mark.nightly) for level in ("fp32", "bf16", "O1", "O2"))])
def test_the_loaded_model_gives_the_logits_of_the_trained_one(prefix: Path, tmp_path: Path, level: str):
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    steps = tiny.WINDOW + 2 if level in ("O1", "O2", "O3") else 3  # with scales from a full window
    with tiny.trainer(tiny.config(prefix, precision=level, train_iters=steps, hidden_dropout=0.1, save=str(tmp_path))) as made:
        made.run()
        device = process_groups.device()
        with torch.no_grad():
            expected = made.training.model.eval()(tokens.to(device), positions.to(device), None)
        model, config, tokenizer = load_for_inference(tmp_path)  # the process groups are there already
        with torch.no_grad():
            assert torch.equal(model(tokens.to(device), positions.to(device), None), expected)
    assert not model.training
    assert config.model.hidden_size == 32
    assert tokenizer.vocab_size == tiny.VOCABULARY


def test_weights_are_whole_in_their_own_format_and_their_values_are_the_best_there_are(good: Path):
    saved, held = CheckpointReader(good), tensors(latest(good))
    assert saved.format(FC1) == (torch.float8_e4m3fn, torch.Size([128, 32]), 1)
    assert saved.format("decoder.final_layernorm.weight")[1:] == (torch.Size([32]), 0)
    weight = saved.weight(FC1)
    assert isinstance(weight, ScalingTensor)
    assert tiny.same(tiny.bits([weight]), tiny.bits([held[f"model/{FC1}"], held[f"model/{FC1}.scale_inv@0,0"]]))
    master = held[f"master/{FC1}"].float() * held[f"master/{FC1}.scale_inv@0,0"]
    assert torch.equal(saved.values(FC1), master)
    assert not torch.equal(weight.dequantize(torch.float32), master)
    norm = saved.weight("decoder.final_layernorm.weight")
    assert torch.equal(norm, held["model/decoder.final_layernorm.weight"])


@pytest.mark.parametrize("read", [CheckpointReader, load_for_inference])
def test_damage_is_named(good: Path, tmp_path: Path, read: type):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in latest(good).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = bytearray((folder / "__0_0.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"__0_0\.bin is damaged"):
        read(folder)
