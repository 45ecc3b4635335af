"""Reading folders that are damaged or hostile, and writing them whole or not at all."""

import json

import pytest
import torch

from megatron.lm.hugging_face.folder import INDEX, MODEL, Tensors, read_json, write_json, write_tensors
from megatron.lm.shell.files import new_folder

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(8, dtype=torch.bfloat16)[2:5],  # a part of a larger storage
    "c": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
}


def same(x, y):
    return x.dtype == y.dtype and torch.equal(x.float(), y.float())


@pytest.mark.parametrize(("limit", "files"), [(1000, 1), (30, 2), (1, 3)])
def test_tensors_come_back_from_one_file_and_from_shards(tmp_path, limit, files):
    assert write_tensors(tmp_path, TENSORS.items(), shard_bytes=limit) == 24 + 6 + 2
    found = sorted(path.name for path in tmp_path.iterdir())
    assert (INDEX in found) == (files > 1)
    assert found[0] == (MODEL if files == 1 else f"model-00001-of-0000{files}.safetensors")
    assert len(found) == files + (files > 1)
    back = Tensors(tmp_path)
    assert len(back) == 3
    assert all(same(back[name], x) for name, x in TENSORS.items())


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/secret.safetensors", "..\\secret.safetensors", "sub/x.safetensors", "x.bin"]
)
def test_an_index_cannot_leave_its_folder(tmp_path, file):
    write_json(tmp_path / INDEX, {"weight_map": {"a": file}})
    with pytest.raises(ValueError, match=r"only .safetensors files of the folder itself are read"):
        Tensors(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_a_damaged_index_is_told(tmp_path, content):
    write_json(tmp_path / INDEX, content)
    with pytest.raises(ValueError, match="has no weight_map"):
        Tensors(tmp_path)


def test_damaged_and_missing_files_are_told(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"pickled files .pytorch_model.bin. are not read"):
        Tensors(tmp_path)
    write_tensors(tmp_path, TENSORS.items(), shard_bytes=1)
    second = tmp_path / "model-00002-of-00003.safetensors"
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["d"] = second.name
    write_json(tmp_path / INDEX, index)
    with pytest.raises(ValueError, match=r"lacks d, which model.safetensors.index.json lists"):
        Tensors(tmp_path)["d"]
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors cannot be read"):
        Tensors(tmp_path)["b"]
    second.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors cannot be read"):
        Tensors(tmp_path)["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json"),
        ("{", "is not valid JSON"),
        ("[]", "contains list, not an object"),
        ("[" * 100000, "is not valid JSON"),
    ],
)
def test_bad_json_is_told(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "config.json")


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    def full():
        yield "a", TENSORS["a"]
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(ValueError, match=r"No space left on device.*free space, or choose another folder"),
        new_folder(tmp_path / "out") as out,
    ):
        write_tensors(out, full(), shard_bytes=1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"), new_folder(tmp_path / "file" / "out"):
        pass
