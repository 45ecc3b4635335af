"""Files that torch's distributed checkpoint and megatron-core read, from chunks of any cut."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import maybe_load_config

from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, read_common
from megatron.lm.checkpoint.foreign.write_torch_dist import FILES, write

WEIGHT = torch.arange(24.0).reshape(2, 4, 3)
KEY, OBJECT = "decoder.layers.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2"


def pieces() -> list[Item]:
    cuts = [(0, slice(0, 1)), (0, slice(1, 4)), (1, slice(0, 4))]  # of no regular grid, as ZeRO cuts rows
    return [Item(KEY, WEIGHT[layer : layer + 1, rows], (2, 4, 3), (layer, rows.start, 0)) for layer, rows in cuts]


def test_torch_megatron_core_and_the_trainer_read_it(tmp_path: Path):
    write(tmp_path, pieces(), {"iteration": 3, "args": None}, [OBJECT], None)
    assert {"__0_0.distcp", *FILES} == {file.name for file in tmp_path.iterdir()}
    assert maybe_load_config(str(tmp_path)).sharded_backend == "torch_dist"
    target = {KEY: torch.empty(2, 4, 3)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(target[KEY], WEIGHT)
    assert OBJECT in dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    stored = TorchDist(tmp_path, read_common(tmp_path))
    for layer in range(2):
        assert torch.equal(stored.tensor(f"model/decoder.layers.{layer}.mlp.linear_fc2.weight"), WEIGHT[layer])


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, RuntimeError), match="file"):
        write(tmp_path / "file", pieces(), {}, [], None)
