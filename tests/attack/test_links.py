"""Folders from elsewhere with links and pipes at the names that a run writes and reads: nothing outside changes, and nothing waits."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import checkpoints, tiny
from megatron.lm.checkpoint.files.folder import marked_iteration
from megatron.lm.checkpoint.files.lock import LOCK_FILE
from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.preprocessing.parts import write_in_parts

SETTINGS = {"precision": "bf16", "train_iters": 2}
LINKS = pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside of every folder that a run is given."""
    file = tmp_path / "precious"
    file.write_text("precious")
    return file


@LINKS
@pytest.mark.parametrize("name", [LOCK_FILE, f"{checkpoints.MARKER}.partial", f"{checkpoints.MARKER}.0123abcd.partial"])
def test_a_checkpoint_folder_with_a_link(prefix: Path, precious: Path, tmp_path: Path, name: str, link: Callable[..., None]):
    """The lock is written in place, so that a link there is refused; what takes its name by a rename replaces a link."""
    save = tmp_path / "save"
    save.mkdir()
    link(precious, save / name)
    settings = tiny.config(prefix, save=str(save), load=str(save), **SETTINGS)
    if name == LOCK_FILE:
        with pytest.raises(ValueError, match=r"\.lock is a (link to|file with 2 names).*: delete it, or"):
            tiny.run(settings)
    else:
        tiny.run(settings)
        assert marked_iteration(save) == 2
    assert precious.read_text() == "precious"


@LINKS
@pytest.mark.parametrize("kind", ["files", "old partials"])
def test_a_dataset_with_links_in_its_index_cache(prefix: Path, precious: Path, tmp_path: Path, kind: str, link: Callable[..., None]):
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    settings = tiny.config(data, **SETTINGS)
    expected = tiny.losses(tiny.run(settings))
    files = [path for path in (tmp_path / "data" / "index_cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json", ""}
    for path in files:
        path.unlink()
        link(precious, path if kind == "files" else path.with_name(f"{path.name}.partial"))
    assert tiny.losses(tiny.run(settings)) == expected
    assert precious.read_text() == "precious"


def test_an_index_cache_that_leads_elsewhere_is_refused(prefix: Path, tmp_path: Path):
    data = shutil.copytree(prefix.parent, tmp_path / "data", ignore=shutil.ignore_patterns("index_cache")) / prefix.name
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "index_cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"index_cache is a link, and files would be written to its target.*--data-cache-path"):
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
        with pytest.raises(ValueError, match=r"is a link to .*, but it must be a regular file"):
            write_datasets(documents, {"text": tmp_path / "d" / "p"}, options, workers=0)
    else:
        write_datasets(documents, {"text": tmp_path / "d" / "p"}, options, workers=0)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_parts_that_lead_elsewhere_are_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "p.parts").symlink_to(tmp_path / "elsewhere")
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=60)
    with pytest.raises(ValueError, match=r"p\.parts is a link"):
        write_in_parts([Document(texts={"text": "1"}, source_bytes=1)], {"text": tmp_path / "p"}, options, source={}, workers=0)
    assert not list((tmp_path / "elsewhere").iterdir())


@LINKS
def test_a_metrics_file_that_is_a_link_is_not_appended_to(prefix: Path, precious: Path, tmp_path: Path, link: Callable[..., None]):
    link(precious, tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a .*: choose another --metrics-file"):
        tiny.run(tiny.config(prefix, metrics_file=str(tmp_path / "metrics.jsonl"), **SETTINGS))
    assert precious.read_text() == "precious"


@pytest.mark.timeout(60)
def test_pipes_end_in_a_line_or_are_replaced(prefix: Path, tmp_path: Path):
    """Of the marker, the index cache, the note of token ids and the counts beside a dataset."""
    data = shutil.copytree(prefix.parent, tmp_path / "data") / prefix.name
    settings = tiny.config(data, save=str(tmp_path / "save"), load=str(tmp_path / "save"), **SETTINGS)
    (tmp_path / "save").mkdir()
    os.mkfifo(tmp_path / "save" / checkpoints.MARKER)
    expected = tiny.losses(tiny.run(settings))
    assert marked_iteration(tmp_path / "save") == 2
    shutil.rmtree(tmp_path / "save")
    for path in [path for path in (tmp_path / "data" / "index_cache").rglob("*") if path.suffix in (".json", ".npy")]:
        path.unlink()
        os.mkfifo(path)
    assert tiny.losses(tiny.run(settings)) == expected
    counts = data.with_name(f"{data.name}.json")
    counts.unlink()
    os.mkfifo(counts)
    with pytest.raises(ValueError, match=r"corpus\.json is a pipe: put the file itself there.*; rebuild the dataset"):
        tiny.run(settings)
