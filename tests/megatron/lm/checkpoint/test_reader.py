"""A checkpoint read by tools and for inference: whole tensors, and a model that gives what the trained one gave."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER, tensors
from megatron.lm.checkpoint import CheckpointReader, latest, load_for_inference
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
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


def test_inference_makes_its_own_process_groups(good: Path):
    with cpu_home():
        try:
            model, _, _ = load_for_inference(str(good))
            assert torch.distributed.get_world_size() == 1
            tokens = torch.zeros(1, 5, dtype=torch.int64, device=process_groups.device())
            assert model(tokens, tokens, None).shape == (1, 5, 64)
        finally:
            process_groups.shutdown()


def test_a_folder_of_checkpoints_gives_the_newest_and_a_checkpoint_itself(good: Path):
    assert CheckpointReader(good).folder == latest(good) == good / "iter_0000004"
    assert CheckpointReader(str(good / "iter_0000002")).info["iteration"] == 2
    assert CheckpointReader(good).config.precision.opt_level == "O3"


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


def test_names_are_those_of_a_model_that_is_not_cut(prefix: Path, good: Path):
    with tiny.trainer(tiny.config(prefix, opt_level="O3")) as made:
        assert sorted(CheckpointReader(good).names()) == sorted(name for name, _ in made.training.model.named_parameters())


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


@pytest.mark.parametrize("name", [FC1, "decoder.final_layernorm.weight"])
def test_values_that_are_not_finite_are_refused(good: Path, tmp_path: Path, name: str):
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    for file in latest(good).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = tensors(folder)[f"model/{name}"].float()
    values.view(-1)[3] = float("nan")
    checkpoints.rewrite(folder, {f"model/{name}": values.to(tensors(folder)[f"model/{name}"].dtype)})
    with pytest.raises(ValueError, match=f"model/{name} has 1 values that are NaN"):
        CheckpointReader(folder).weight(name)


def test_a_weight_of_no_elements_is_refused(good: Path, tmp_path: Path):
    folder = Path(shutil.copytree(latest(good), tmp_path / "iter_0000004"))
    keys = (f"model/{FC1}", f"master/{FC1}")
    checkpoints.rewrite(folder, {key: tensors(folder)[key][:0].clone() for key in keys})
    for read in (CheckpointReader(folder).values, CheckpointReader(folder).weight):
        with pytest.raises(ValueError, match=rf"/{FC1} is \(0, 32\), which is empty; load an older checkpoint"):
            read(FC1)


def test_settings_that_are_none_build_no_model(good: Path, tmp_path: Path):
    folder = Path(shutil.copytree(latest(good), tmp_path / "iter_0000004"))
    config = json.loads((folder / "checkpoint.json").read_text())["config"]
    config["precision"]["save_activations"] = "auto"
    checkpoints.seal(folder, config=config)
    with pytest.raises(ValueError, match=r"iter_0000004 has an invalid configuration: --save-activations auto: choose one of"):
        load_for_inference(folder)


def test_inference_from_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=f"holds no checkpoint.*{MARKER}"):
        load_for_inference(tmp_path)
