"""Pipes in the place of files, in every kind of folder that may come from elsewhere: a read ends in a line and waits for no writer."""

import os
import shutil
from pathlib import Path

import pytest

from helpers import checkpoints, hf_models, tiny
from megatron.lm.checkpoint.files.folder import INFO_FILE
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.hugging_face.folder import INDEX, MODEL, write_json, write_tensors
from megatron.lm.tools import convert_checkpoint
from megatron.lm.tools.convert.hugging_face import to_hf

pytestmark = pytest.mark.timeout(120)


def piped(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert convert_checkpoint.main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


@pytest.fixture(scope="module")
def folder_of_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    about, tensors = to_hf(hf_models.config("llama"), tiny.VOCABULARY, hf_models.random_weights(hf_models.config("llama")))
    write_tensors(folder, tensors.items())
    write_json(folder / "config.json", about)
    return folder


@pytest.mark.parametrize("name", ["config.json", MODEL, INDEX, "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"])
def test_in_a_hugging_face_folder(folder_of_hf: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    folder = Path(shutil.copytree(folder_of_hf, tmp_path / "hf"))
    piped(folder / name)
    told = said(capsys, "from-hf", "--load", folder, "--output", tmp_path / "o")
    assert f"{folder / name} is not a regular file: put the file itself there" in told
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", [INFO_FILE, PLAN_FILE, "__0_0.bin"])
def test_in_a_checkpoint(prefix: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    folder = checkpoints.saved(prefix, tmp_path / "saved", precision="bf16") / "iter_0000004"
    piped(folder / name)
    assert str(folder) in said(capsys, "inspect", "--load", folder)
    with pytest.raises(ValueError, match=r"iter_0000004"):
        checkpoints.resume(prefix, folder.parent)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_in_a_dataset(prefix: Path, tmp_path: Path, suffix: str):
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    piped(data.with_name(data.name + suffix))
    with pytest.raises(ValueError, match=rf"{data.name}\{suffix} (do not exist|is a pipe)"):
        tiny.run(tiny.config(data, precision="bf16", train_iters=1))


def test_in_the_note_of_token_ids(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Which is only a shortcut: the ids are checked again."""
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    settings = tiny.config(data, precision="bf16", train_iters=1)
    expected = tiny.losses(tiny.run(settings))
    (note,) = (tmp_path / "data").rglob("token_range.json")
    piped(note)
    assert tiny.losses(tiny.run(settings)) == expected
    assert f"{note} is invalid ({note} is a pipe: put the file itself there): the token ids are checked again" in capsys.readouterr().out
    assert note.is_file()
