"""What a rank stores: every tensor in its own precision under its name in the whole model, and once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import tiny
from megatron.lm.checkpoint import content
from megatron.lm.checkpoint.content import items, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.place import Place
from megatron.lm.processes.grid import Ranks
from megatron.lm.run.trainer import Trainer

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
