"""Pipes in the place of files, in every kind of folder that may come from elsewhere: a read waits for no writer."""

import os
import shutil
from pathlib import Path

import pytest

from helpers import checkpoints, hf_models, tiny
from megatron.lm.checkpoint.files.folder import INFO_FILE
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.hugging_face.folder import MODEL, write_json, write_tensors
from megatron.lm.tools import convert_checkpoint

pytestmark = pytest.mark.timeout(120)


def piped(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert convert_checkpoint.main([str(word) for word in words]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["config.json", MODEL, "tokenizer.json", "merges.txt"])
def test_in_a_hugging_face_folder(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    about, tensors = hf_models.to_hf(hf_models.config("llama"), tiny.VOCABULARY, hf_models.random_weights(hf_models.config("llama")))
    folder = tmp_path / "hf"
    folder.mkdir()
    write_tensors(folder, tensors.items())
    write_json(folder / "config.json", about)
    piped(folder / name)
    assert str(folder / name) in refused(capsys, "from-hf", "--load", folder, "--output", tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", [INFO_FILE, PLAN_FILE, "__0_0.bin"])
def test_in_a_checkpoint(prefix: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    folder = checkpoints.saved(prefix, tmp_path / "saved", precision="bf16") / "iter_0000004"
    piped(folder / name)
    assert str(folder) in refused(capsys, "inspect", "--load", folder)
    with pytest.raises(ValueError, match=r"iter_0000004"):
        checkpoints.resume(prefix, folder.parent)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_in_a_dataset(prefix: Path, tmp_path: Path, suffix: str):
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    piped(data.with_name(data.name + suffix))
    with pytest.raises(ValueError, match=rf"{data.name}\{suffix}"):
        tiny.run(tiny.config(data, precision="bf16", train_iters=1))


def test_in_a_cache_it_is_written_again(prefix: Path, tmp_path: Path):
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    settings = tiny.config(data, precision="bf16", train_iters=1)
    expected = tiny.losses(tiny.run(settings))
    for path in [path for path in (tmp_path / "data" / "index_cache").rglob("*") if path.suffix in (".json", ".npy")]:
        piped(path)
    assert tiny.losses(tiny.run(settings)) == expected
