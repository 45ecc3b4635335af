"""Reading folders that are damaged or hostile, and writing them whole or not at all."""

import json

import pytest
import torch

from tools.convert import folder
from tools.convert.folder import INDEX, MODEL, Tensors, new_folder, read_json, write_json, write_tensors

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
    with pytest.raises(ValueError, match=r"lacks d, which model.safetensors.index.json says"):
        Tensors(tmp_path)["d"]
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors cannot be read"):
        Tensors(tmp_path)["b"]
    second.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors cannot be read"):
        Tensors(tmp_path)["b"]


@pytest.mark.parametrize(("text", "message"), [(None, "is missing"), ("{", "is no JSON"), ("[]", "holds list, not an object")])
def test_bad_json_is_told(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "config.json")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    output = tmp_path / "deep" / "out"
    with new_folder(output) as partial:
        (partial / "x").write_text("x")
        assert not output.exists()
    assert (output / "x").read_text() == "x"
    with pytest.raises(ValueError, match="exists and is not an empty folder: nothing is overwritten"), new_folder(output):
        pass
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other"):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]


def test_an_empty_folder_is_filled_and_anothers_work_left_alone(tmp_path, monkeypatch):
    output = tmp_path / "out"
    output.mkdir()
    monkeypatch.chdir(output)
    with new_folder(folder.Path(".")) as partial:
        (partial / "x").write_text("x")
    assert (output / "x").is_file()
    (tmp_path / "busy.partial").mkdir()
    (tmp_path / "busy.partial" / "y").write_text("y")
    with pytest.raises(ValueError, match="another conversion is writing it, or one was killed"), new_folder(tmp_path / "busy"):
        pass
    assert (tmp_path / "busy.partial" / "y").is_file()


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    def full():
        yield "a", TENSORS["a"]
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(ValueError, match=r"No space left on device.*free space, or name another --output"),
        new_folder(tmp_path / "out") as out,
    ):
        write_tensors(out, full(), shard_bytes=1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"), new_folder(tmp_path / "file" / "out"):
        pass
