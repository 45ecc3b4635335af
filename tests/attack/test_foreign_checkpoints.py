"""Hostile checkpoints in Megatron-LM's format: nothing in their pickles is imported, called or built."""

import io
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron.lm.checkpoint.files.folder import is_torch_dist
from megatron.lm.checkpoint.foreign import pickled
from megatron.lm.checkpoint.foreign.pickled import plain_of_zip
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, read_common

STATE = {"decoder.layers.mlp.linear_fc2.weight": torch.arange(12.0).reshape(2, 2, 3), "output_layer.weight": torch.ones(4, 2)}


class Runs:
    """Whoever unpickles it calls `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two tensors and an `_extra_state`, by torch and megatron-core alone."""
    extra = io.BytesIO(saved([None]))
    held = STATE | {"decoder.layers.mlp.linear_fc2._extra_state/shard_0_2": extra}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(held, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner, no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    (tmp_path / "common.pt").write_bytes(saved({"args": Namespace(num_layers=2), "iteration": 10}))
    return tmp_path


def renewed(folder: Path, common: Any) -> None:
    """Store the common state as megatron-core 0.19 does: among the chunks, without `common.pt`."""
    (folder / "common.pt").unlink()
    (folder / "newer.distcp").write_bytes(data := b"before" + saved([common]))
    change_plan(folder, relative_path="newer.distcp", offset=6, length=len(data) - 6)


def change_plan(folder: Path, **place: Any) -> None:
    """Change the position of the common state among the chunks."""
    plan = pickle.loads((folder / ".metadata").read_bytes())
    index = MetadataIndex("common_state/shard_0_1")
    if index not in plan.storage_data:
        plan.state_dict_metadata[index.fqn], plan.storage_data[index] = BytesStorageMetadata(), _StorageInfo("", 0, 0)
    vars(plan.storage_data[index]).update(place)
    (folder / ".metadata").write_bytes(pickle.dumps(plan))


def evil(folder: Path) -> Runs:
    return Runs(os.system, f"touch {folder}/ran")


def opened(folder: Path) -> TorchDist:
    return TorchDist(folder, read_common(folder))


def test_the_checkpoint_itself_is_read(folder: Path):
    stored = opened(folder)
    assert torch.equal(stored.tensor("model/decoder.layers.1.mlp.linear_fc2.weight"), STATE["decoder.layers.mlp.linear_fc2.weight"][1])
    assert torch.equal(stored.tensor("model/output_layer.weight"), STATE["output_layer.weight"])
    assert len(stored.tensors) == 3  # the object is none


@pytest.mark.promise("Checkpoints of Megatron-LM", "Pickles in them are parsed, not executed: a name that has no place there is refused.")
def test_metadata_that_runs_code_is_refused_and_does_not_run(folder: Path):
    plan = pickle.loads((folder / ".metadata").read_bytes())
    plan.all_local_plans = [evil(folder)]
    (folder / ".metadata").write_bytes(pickle.dumps(plan))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \(it names 'posix\.system', which is not allowed in a checkpoint\)"):
        opened(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("inside", ["alone", "in args"])
def test_common_that_runs_code_is_refused_and_does_not_run(folder: Path, inside: str):
    value: Any = {"args": Namespace(evil=evil(folder))} if inside == "in args" else evil(folder)
    (folder / "common.pt").write_bytes(saved(value))
    with pytest.raises(ValueError, match=r"common\.pt cannot be read \(it names 'posix\.system', which is not allowed in a checkpoint\)"):
        opened(folder)
    assert not (folder / "ran").exists()


def test_the_common_state_among_the_chunks_is_read(folder: Path):
    common = read_common(folder)
    renewed(folder, {"args": Namespace(num_layers=2), "iteration": 10})
    assert is_torch_dist(folder)
    assert read_common(folder) == common == {"args": {"num_layers": 2}, "iteration": 10}
    assert len(opened(folder).tensors) == 3


@pytest.mark.parametrize("inside", ["alone", "in args"])
def test_a_common_state_among_the_chunks_that_runs_code_is_refused_and_does_not_run(folder: Path, inside: str):
    renewed(folder, {"args": Namespace(evil=evil(folder))} if inside == "in args" else evil(folder))
    with pytest.raises(
        ValueError, match=r"newer\.distcp cannot be read \(it names 'posix\.system', which is not allowed in a checkpoint\)"
    ):
        opened(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"relative_path": "../common.pt"}, r"it names '\.\./common\.pt', which is outside its folder"),
        ({"offset": 10**6}, "common_state/shard_0_1' ends at byte .* of newer.distcp"),
        ({"offset": -1}, r"is not an integer in \[0, 2\^63\)"),
        ({"length": 100}, "it is not a file of torch.save"),
        ({"length": 0}, "it is not a file of torch.save"),
    ],
)
def test_a_common_state_at_a_wrong_position_is_refused(folder: Path, place: dict[str, Any], said: str):
    renewed(folder, {"iteration": 10})
    (folder.parent / "common.pt").write_bytes(saved({"iteration": 11}))
    change_plan(folder, **place)
    with pytest.raises(ValueError, match=said):
        read_common(folder)


def test_a_folder_that_lost_its_common_state_is_refused_by_name(folder: Path):
    (folder / "common.pt").unlink()
    with pytest.raises(ValueError, match=r"common\.pt cannot be read \(it is missing, and in \.metadata it has no common_state"):
        read_common(folder)


def test_a_hybrid_model_is_refused_by_name(folder: Path):
    (folder / "common.pt").write_bytes(saved({"args": Namespace(hybrid_layer_pattern="*-*-")}))
    with pytest.raises(ValueError, match=r"has a HybridModel of Megatron-LM, with hybrid_layer_pattern '\*-\*-'"):
        opened(folder)


@pytest.mark.parametrize("attack", ["code", "garbage"])
def test_extra_state_is_not_read_whatever_is_in_it(folder: Path, attack: str):
    """Its bytes lie in a data file; the plan names them, and no reader asks for them."""
    plan = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (index for index in plan.storage_data if "_extra_state" in index.fqn)
    place = plan.storage_data[index]
    data = saved([evil(folder)]) if attack == "code" else b"\xff" * 100
    place.relative_path, place.offset, place.length = "extra.distcp", 0, len(data)
    (folder / "extra.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(plan))
    stored = opened(folder)
    for key in stored.tensors:
        stored.tensor(key)
    assert not (folder / "ran").exists()


def test_a_chunk_that_runs_code_is_refused_and_does_not_run(folder: Path):
    plan = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (index for index in plan.storage_data if index.fqn == "output_layer.weight")
    place = plan.storage_data[index]
    data = saved(evil(folder)).ljust(1000, b"\0")
    place.relative_path, place.offset, place.length = "evil.distcp", 0, len(data)
    (folder / "evil.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(plan))
    with pytest.raises(ValueError, match=r"evil\.distcp cannot be read"):
        opened(folder).tensor("model/output_layer.weight")
    assert not (folder / "ran").exists()


def zipped(program: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("common/data.pkl", b"\x80\x04" + program + b".")
    return stream.getvalue()


def test_a_list_that_doubles_itself_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch):
    """Each list holds the one before it twice, 60 deep: 200 bytes that stand for 2^60 values."""
    doubled = b"]\x94" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(60))
    assert pickled._MOST_VALUES == 2**20
    monkeypatch.setattr(pickled, "_MOST_VALUES", 2**14)  # fewer are sooner reached
    with pytest.raises(ValueError, match="it has more than 16384 values"):
        plain_of_zip(zipped(b"(" + doubled + b"t"))


def test_a_nest_without_end_is_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        plain_of_zip(zipped(b"]" * 20000 + b"a" * 19999))


def test_a_list_that_holds_itself_is_refused():
    with pytest.raises(ValueError, match=r"nested too deeply|more than"):
        plain_of_zip(zipped(b"]\x94h\x00a"))


def test_links_out_of_the_folder_are_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "common.pt"
    (folder / "common.pt").rename(elsewhere)
    (folder / "common.pt").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"common\.pt cannot be read .* is a link"):
        opened(folder)
