"""Folders from elsewhere with links at the names that a run writes: nothing outside changes."""

import shutil
from pathlib import Path

import pytest

from helpers import checkpoints, tiny
from megatron.lm.checkpoint.files.folder import LOCK_FILE, marked_iteration
from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document

SETTINGS = {"precision": "bf16", "train_iters": 2}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside of every folder that a run is given."""
    file = tmp_path / "precious"
    file.write_text("precious")
    return file


@pytest.mark.parametrize("name", [LOCK_FILE, f"{checkpoints.MARKER}.partial", f"{checkpoints.MARKER}.0123abcd.partial"])
def test_a_checkpoint_folder_with_a_link(prefix: Path, precious: Path, tmp_path: Path, name: str):
    """The lock is written in place, so that a link there is refused; what takes its name by a rename replaces a link."""
    save = tmp_path / "save"
    save.mkdir()
    (save / name).symlink_to(precious)
    settings = tiny.config(prefix, save=str(save), load=str(save), **SETTINGS)
    if name == LOCK_FILE:
        with pytest.raises(ValueError, match=r"\.lock"):
            tiny.run(settings)
    else:
        tiny.run(settings)
        assert marked_iteration(save) == 2
    assert precious.read_text() == "precious"


def test_a_folder_of_non_persistent_checkpoints_that_leads_elsewhere_is_refused(prefix: Path, tmp_path: Path):
    """A run there wrote `.lock` and `iter_N` into the target, and deleted the checkpoints that its own run had there."""
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    tiny.run(tiny.config(prefix, save=str(save), **SETTINGS))
    shutil.copytree(save, elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    (save / "non_persistent").symlink_to(elsewhere)
    for more in ({"load": str(save)}, {}):
        settings = tiny.config(prefix, save=str(save), non_persistent_save_interval=1, **(SETTINGS | more | {"train_iters": 4}))
        with pytest.raises(ValueError, match="non_persistent is a link"):
            tiny.run(settings)
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["iter_0000001", "iter_0000002.partial", "iter_0000002.replaced", "iter_0000002"])
def test_a_checkpoint_that_is_a_link_is_replaced_or_deleted_without_its_target(prefix: Path, tmp_path: Path, name: str):
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    tiny.run(tiny.config(prefix, save=str(elsewhere), **SETTINGS))
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    save.mkdir()
    (save / name).symlink_to(elsewhere / "iter_0000002")
    settings = tiny.config(prefix, save=str(save), save_interval=1, keep_last=1, **SETTINGS)
    if not name.endswith(".partial"):
        with pytest.raises(ValueError, match="--save"):
            tiny.run(settings)
    else:
        tiny.run(settings)
        assert marked_iteration(save) == 2
        assert not (save / name).is_symlink()
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["files", "old partials"])
def test_a_dataset_with_links_in_its_index_cache(prefix: Path, precious: Path, tmp_path: Path, kind: str):
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    settings = tiny.config(data, **SETTINGS)
    expected = tiny.losses(tiny.run(settings))
    files = [path for path in (tmp_path / "data" / "index_cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json", ""}
    for path in files:
        path.unlink()
        (path if kind == "files" else path.with_name(f"{path.name}.partial")).symlink_to(precious)
    assert tiny.losses(tiny.run(settings)) == expected
    assert precious.read_text() == "precious"


def test_an_index_cache_that_leads_elsewhere_is_refused(prefix: Path, tmp_path: Path):
    data = shutil.copytree(prefix.parent, tmp_path / "data", ignore=shutil.ignore_patterns("index_cache")) / prefix.name
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "index_cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="--data-cache-path"):
        tiny.run(tiny.config(data, **SETTINGS))
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".bin.partial", ".idx.partial", ".json.partial"])
def test_links_where_a_dataset_is_written(tmp_path: Path, precious: Path, suffix: str, there: bool):
    target = precious if there else tmp_path / "new"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / f"p{suffix}").symlink_to(target)
    documents = [Document(texts={"text": "1 2 3"}, source_bytes=5)]
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=60)
    if suffix == ".bin.partial":
        with pytest.raises(ValueError, match=r"\.bin\.partial"):
            write_datasets(documents, {"text": tmp_path / "d" / "p"}, options, workers=0)
    else:
        write_datasets(documents, {"text": tmp_path / "d" / "p"}, options, workers=0)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_metrics_file_that_is_a_link_is_not_appended_to(prefix: Path, precious: Path, tmp_path: Path):
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(ValueError, match="--metrics-file"):
        tiny.run(tiny.config(prefix, metrics_file=str(tmp_path / "metrics.jsonl"), **SETTINGS))
    assert precious.read_text() == "precious"
