"""What a rank stores: every tensor in its own precision under its name in the whole model, and once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import tensors
from megatron.lm.checkpoint import CheckpointReader, content, iteration_folder, latest, load_for_inference
from megatron.lm.checkpoint.content import items, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.place import Place
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import Ranks
from megatron.lm.run.trainer import Trainer
from msamp.numerics.tensor import ScalingTensor

LINEAR, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
E4M3, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
# Dtypes of weight, master, m and v; None: not kept, since the weight is its own master.
KEPT: dict[str, dict[str, list[torch.dtype | None]]] = {
    "fp32": {LINEAR: [FP32, None, FP32, FP32], EMBEDDING: [FP32, None, FP32, FP32], NORM: [FP32, None, FP32, FP32]},
    "bf16": {LINEAR: [BF16, FP32, FP32, FP32], EMBEDDING: [BF16, FP32, FP32, FP32], NORM: [BF16, FP32, FP32, FP32]},
    "O1": {LINEAR: [FP16, None, FP32, FP32], EMBEDDING: [BF16, FP16, FP32, FP32], NORM: [BF16, FP32, FP32, FP32]},
    "O2": {LINEAR: [FP16, None, E4M3, FP16], EMBEDDING: [BF16, FP16, E4M3, FP16], NORM: [BF16, FP32, FP32, FP32]},
    "O3": {LINEAR: [E4M3, FP16, E4M3, FP16], EMBEDDING: [BF16, FP16, E4M3, FP16], NORM: [BF16, FP32, FP32, FP32]},
}


@pytest.fixture(scope="module", params=KEPT)
def made(request: pytest.FixtureRequest, prefix: Path) -> Iterator[tuple[str, Trainer]]:
    """A precision recipe, and a trainer that has done two steps."""
    with tiny.trainer(tiny.config(prefix, precision=request.param, train_iters=4, exit_interval=2)) as trainer:
        trainer.run()
        yield request.param, trainer


def by_key(found: list[Item]) -> dict[str, Item]:
    keys = {item.key: item for item in found}
    assert len(keys) == len(found), "one process stores every tensor in one chunk"
    return keys


def test_every_tensor_is_stored_once_in_its_own_precision(made: tuple[str, Trainer]):
    level, trainer = made
    found = by_key(items(trainer.training))
    for name, dtypes in KEPT[level].items():
        keys = [f"{prefix}/{name}" for prefix in ("model", "master", "exp_avg", "exp_avg_sq")]
        assert [found[key].tensor.dtype if key in found else None for key in keys] == dtypes
        for key, dtype in zip(keys, dtypes, strict=True):
            if dtype is not None:
                item = found[key]
                assert item.tensor.shape == item.shape == trainer.training.model.get_parameter(name).shape
                assert (scale_key(key, item.offset) in found) == (dtype in (E4M3, FP16))
        assert float(found[f"step/{name}"].tensor) == 2
    assert any(key.startswith("rng/0/torch") for key in found)
    assert any(key.endswith("linear_fc2.scaling.history") for key in found) == (level in ("O1", "O2", "O3"))


# Pieces and shares


def place(start: int, rows: int, offset: int, first: bool = True) -> Place:
    return Place(name="w", shape=(40, 2), offset=(offset, 0), start=start, sizes=(rows, 2), first=first)


def test_data_parallel_ranks_share_the_writing():
    groups = [[Item.whole(f"{number}", torch.zeros(elements))] for number, elements in enumerate([10, 40, 10, 10, 10, 30, 0, 10])]
    dealt = []
    for rank in range(3):
        share = content._Share()
        dealt.append([item for group in groups for item in share.of_this_rank(group, Ranks(rank, 3))])
    assert sorted(item.key for items in dealt for item in items) == sorted(item.key for (item,) in groups)
    loads = [sum(item.tensor.nbytes for item in items) for items in dealt]
    assert max(loads) - min(loads) <= 4 * 40  # the largest tensor


# A checkpoint read by tools and for inference: whole tensors, and a model that gives what the trained one gave.


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


# COAT's moments in the trainer: they train as FP32 ones do, resume to the bit, and are converted from and to other formats.


SAVED, LAST = 4, 8
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def train(made: Trainer) -> tuple[list[float], list[Any]]:
    rows: list[dict[str, Any]] = []
    made.metrics.write = rows.append  # type: ignore[method-assign]
    made.run()
    optimizer = made.training.optimizer
    states = [x for holding in optimizer.holdings() for _, x in sorted(optimizer.state[holding.weight].items())]
    return tiny.losses(rows), tiny.bits([*made.training.model.parameters(), *states])


def run(prefix: Path, precision: str, **settings: Any) -> tuple[list[float], list[Any]]:
    with tiny.trainer(tiny.config(prefix, precision=precision, swiglu=True, train_iters=LAST, **settings)) as made:
        return train(made)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly(2)), "O2"])
def test_it_goes_on_bit_for_bit(prefix: Path, tmp_path: Path, precision: str):
    coat = {"optimizer_state": "coat", "exp_avg_sq_format": "coat-e5m2" if precision == "O2" else None}
    straight = run(prefix, precision, save=str(tmp_path), save_interval=SAVED, **coat)
    again = run(prefix, precision, load=str(tmp_path), ckpt_step=SAVED, **coat)
    assert again[0] == straight[0][SAVED:]
    assert tiny.same(again[1], straight[1])
    stored = CheckpointReader(iteration_folder(tmp_path, LAST)).stored
    rows, columns = stored.tensors[f"exp_avg/{WEIGHT}"].shape
    assert {str(entry.dtype) for key, entry in stored.tensors.items() if key.startswith(f"exp_avg/{WEIGHT}")} == {
        "torch.float8_e4m3fn",
        "torch.float32",
    }
    numbers = [entry.shape for key, entry in stored.tensors.items() if key.startswith((f"exp_avg/{WEIGHT}.max@", f"exp_avg/{WEIGHT}.k@"))]
    assert {size[1] for size in numbers} == {-(-columns // 128)}
    assert sum(size[0] for size in numbers) == 2 * rows
