"""Checkpoints that plain megatron-core 0.16.1 wrote in a process without this repository: every tensor to the bit, in any grid."""

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import maybe_load_config

from helpers import hosts, megatron_checkpoints
from helpers.megatron_checkpoints import CASES
from helpers.megatron_jobs import job
from megatron.lm.checkpoint.files.folder import is_torch_dist
from megatron.lm.checkpoint.files.index import Chunk, Entry
from megatron.lm.checkpoint.files.storage import Item, Region
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, _joined, read_common
from megatron.lm.checkpoint.foreign.write_torch_dist import FILES, write


def opened(folder: Path, case: str) -> TorchDist:
    checkpoint = folder / case / "iter_0000010"
    return TorchDist(checkpoint, read_common(checkpoint))


@pytest.mark.promise(
    "Checkpoints of Megatron-LM", "Every tensor that plain megatron-core 0.16.1 wrote is read to the bit, at TP 1, TP 2 and PP 2."
)
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_the_bits_that_megatron_core_held(written: Path, case: str):
    stored, expected = opened(written, case), megatron_checkpoints.whole(written, case)
    assert is_torch_dist(stored.folder)
    if case == "dp_reshardable":
        assert "--dist-ckpt-optim-fully-reshardable" in (stored.moments_refused or "")
        expected = {key: x for key, x in expected.items() if key.startswith("model/")}
    else:
        assert stored.moments_refused is None
        assert stored.tensor("step/decoder.layers.1.mlp.linear_fc1.weight").item() == stored.step == 3
    if CASES[case].get("optimizer") == "plain" and "dtype" not in CASES[case]:
        expected = {key: x for key, x in expected.items() if not key.startswith("master/")}  # an FP32 weight is its own
    assert {key for key in stored.tensors if not key.startswith("step/")} == expected.keys()
    for key, x in expected.items():
        found = stored.tensor(key)
        assert found.dtype == x.dtype, key
        assert torch.equal(found, x), key


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_every_tensor_has_the_bits_of_another_megatron_core(tmp_path: Path, version: str):
    """The installed version, 0.16.1 or the newest, is that of the other tests."""
    site = Path(sys.prefix, "megatron-core", version)
    if not site.exists():
        hosts.lacks(f"needs megatron-core {version} in {site}: make test-newest")
    cases = {name: CASES[name] for name in ("llama", "bf16")}
    job("write", tmp_path, cases, 2, str(site))
    for case in cases:
        stored, expected = opened(tmp_path, case), megatron_checkpoints.whole(tmp_path, case)
        assert {key for key in stored.tensors if not key.startswith("step/")} == expected.keys()
        assert all(torch.equal(stored.tensor(key), x) for key, x in expected.items())


def test_a_hybrid_model_of_megatron_core_is_refused_by_name(tmp_path: Path):
    if find_spec("megatron.core.models.hybrid") is None:
        hosts.lacks("needs megatron-core 0.18 or later: make test-newest")
    job("write", tmp_path, {"hybrid": {"hybrid": "*-*-", "layers": 4}})
    with pytest.raises(ValueError, match=r"has a HybridModel of Megatron-LM, with hybrid_layer_pattern '\*-\*-'"):
        opened(tmp_path, "hybrid")


def test_a_region_is_read_across_the_shards_of_the_writer(written: Path):
    stored, key = opened(written, "llama"), "model/decoder.layers.1.mlp.linear_fc1.weight"
    into = torch.empty(50, 7)
    stored.read([Region(key, (20, 3), into)])
    assert torch.equal(into, megatron_checkpoints.whole(written, "llama")[key][20:70, 3:10])


def test_flattened_shards_of_model_space_are_put_together():
    """As megatron-core up to 0.14 stores a state of [4, 6] under TP 2 along the rows, each shard cut between two data-parallel ranks."""
    pieces = [((0, 0, 0), (1, 1, 5)), ((0, 0, 5), (1, 1, 7)), ((1, 0, 0), (1, 1, 12))]
    chunks = tuple(Chunk(offset, torch.Size(shape), "f", i, 1) for i, (offset, shape) in enumerate(pieces))
    found = _joined("k", Entry(torch.float32, torch.Size((2, 1, 12)), chunks), torch.Size((4, 6)))
    assert found.shape == (4, 6)
    assert [(tile.offset, tuple(tile.shape), len(tile.parts)) for tile in found.chunks] == [((0, 0), (2, 6), 2), ((2, 0), (2, 6), 1)]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="does not divide the shape"):
        _joined("k", Entry(torch.float32, torch.Size((3, 1, 8)), chunks), torch.Size((4, 6)))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metadata.json", json.dumps({"sharded_backend": "zarr"}), "its sharded_backend is not torch_dist; save it with --ckpt-format"),
        ("metadata.json", "[" * 10**5, "metadata.json cannot be read"),
        ("common.pt", "PK", "common.pt cannot be read .it is not a file of torch.save"),
        (".metadata", "", "metadata (cannot be read|it is not a pickle)"),
    ],
)
def test_a_damaged_file_is_refused_by_name(written: Path, tmp_path: Path, file: str, content: str, said: str):
    folder = tmp_path / "iter_0000010"
    shutil.copytree(written / "gpt2" / "iter_0000010", folder)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        TorchDist(folder, read_common(folder))


def test_a_short_data_file_is_refused_before_a_tensor_is_read(written: Path, tmp_path: Path):
    folder = tmp_path / "iter_0000010"
    shutil.copytree(written / "gpt2" / "iter_0000010", folder)
    data = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"of {data.name}, which has 1000"):
        TorchDist(folder, read_common(folder))


def test_a_file_without_a_digest_is_refused_where_digests_are_known(written: Path):
    folder = written / "gpt2" / "iter_0000010"
    names = [*(file.name for file in folder.iterdir()), "common.pt"]  # which the trainer always writes
    TorchDist(folder, read_common(folder), names)
    for lost in ("__0_0.distcp", "common.pt"):
        with pytest.raises(ValueError, match=f"{re.escape(lost)} has no digest in checkpoint.json"):
            TorchDist(folder, read_common(folder), [name for name in names if name != lost])


# Files that torch's distributed checkpoint and megatron-core read, from chunks of any cut.


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
