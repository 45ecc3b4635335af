"""What a rank stores: every tensor in its own precision under its name in the whole model, and once."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import tiny
from megatron.lm.checkpoint import content
from megatron.lm.checkpoint.content import at, info, items, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.place import Place
from megatron.lm.config.cli import config_from_dict
from megatron.lm.processes.grid import Ranks
from megatron.lm.run.trainer import Trainer
from msamp.numerics import formats
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


def test_what_is_stored_is_the_memory_itself(made: tuple[str, Trainer]):
    """A save that waits for the disk copies nothing first."""
    _, trainer = made
    found = by_key(items(trainer.training))
    for name, p in trainer.training.model.named_parameters():
        payload = p.payload if isinstance(p, ScalingTensor) else p
        assert found[f"model/{name}"].tensor.data_ptr() == payload.data_ptr()


def test_what_is_not_a_tensor_is_json_that_leads_back_to_the_run(made: tuple[str, Trainer]):
    _, trainer = made
    training = trainer.training
    training.passed_over, training.optimizer.skipped_steps = 12, 1
    found = json.loads(json.dumps(info(training)))
    assert config_from_dict(found["config"]) == training.config
    assert (found["iteration"], found["consumed_samples"], found["schedule_steps"], found["processes"]) == (2, 8, 2, 1)
    assert (found["passed_over"], found["skipped_steps"], found["vocab_size"]) == (12, 1, tiny.VOCABULARY)
    assert found["torch"] == str(torch.__version__)


def test_keys_of_chunks():
    assert at("mu/w", (0, 512)) == "mu/w@0,512"
    assert scale_key("exp_avg/w", (64, 0)) == "exp_avg/w.scale_inv@64,0"
    assert at("mu/w", ()) == "mu/w@"


# Pieces and shares


def place(start: int, rows: int, offset: int, first: bool = True) -> Place:
    return Place(name="w", shape=(40, 2), offset=(offset, 0), start=start, sizes=(rows, 2), first=first)


def test_a_piece_is_stored_where_its_rows_stand_with_its_scale():
    """An owner's rows of SwiGLU's first layer: some of the gate, some of the linear half."""
    where = [place(0, 6, 0), place(6, 6, 20)]
    x = ScalingTensor.quantize(torch.arange(1.0, 11.0).view(5, 2), formats.E4M3)
    found = list(content._chunks("exp_avg", where, x, slice(4, 9)))
    payloads, scales = found[::2], found[1::2]
    assert [(item.key, item.offset, item.shape) for item in payloads] == [("exp_avg/w", (4, 0), (40, 2)), ("exp_avg/w", (20, 0), (40, 2))]
    assert torch.equal(torch.cat([item.tensor for item in payloads]).view(torch.uint8), x.payload.view(torch.uint8))
    assert [item.key for item in scales] == ["exp_avg/w.scale_inv@4,0", "exp_avg/w.scale_inv@20,0"]
    assert all(torch.equal(item.tensor, x.scale_inv) for item in scales)
    step = torch.tensor(3.0)
    assert [item.key for item in content._scalars("step", where, step, slice(0, 4))] == ["step/w"]
    assert list(content._scalars("step", where, step, slice(4, 9))) == []


def test_copies_on_other_ranks_are_not_stored():
    where = [place(0, 6, 0, first=False)]
    assert list(content._chunks("model", where, torch.zeros(6, 2))) == []
    assert list(content._scalars("step", where, torch.zeros(()), None)) == []


def test_data_parallel_ranks_share_the_writing():
    groups = [[Item.whole(f"{number}", torch.zeros(elements))] for number, elements in enumerate([10, 40, 10, 10, 10, 30, 0, 10])]
    dealt = []
    for rank in range(3):
        share = content._Share()
        dealt.append([item for group in groups for item in share.of_this_rank(group, Ranks(rank, 3))])
    assert sorted(item.key for items in dealt for item in items) == sorted(item.key for (item,) in groups)
    loads = [sum(item.tensor.nbytes for item in items) for items in dealt]
    assert max(loads) - min(loads) <= 4 * 40  # the largest tensor
