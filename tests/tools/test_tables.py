"""`make tables`: what is published is what the rows say, and what is stale is found."""

import shutil

import pytest

from tools import tables
from tools.measurements import ROOT


@pytest.mark.promise("Tools", "Every published number is computed from the measurements.")
def test_what_is_published_is_what_the_rows_say(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_stale_pages_and_pictures_are_found_and_written(tmp_path, capsys):
    for folder in (tables.FIGURE_FOLDER, "docs/reproduction"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs/reference").mkdir()
    shutil.copy(ROOT / "docs/reference/promises.md", tmp_path / "docs/reference")
    (tmp_path / "README.md").write_text("before\n<!-- table: memory-error -->\n<!-- end -->\nafter\n")
    page, other = (tmp_path / "docs/reproduction" / f"{name}.md" for name in ("collage-table2", "fp8lm-table99"))
    page.write_text(page.read_text().replace("12", "11"))
    other.write_text("of an entry that is gone")
    picture = tmp_path / tables.FIGURE_FOLDER / "fp8lm-figure7.png"
    picture.write_bytes(b"of other numbers")
    assert tables.main(["--check"], tmp_path) == 1
    stale = capsys.readouterr().out
    assert all(name in stale for name in ("README.md", "collage-table2.md", "fp8lm-table99.md", "fp8lm-figure7.png"))
    assert tables.main([], tmp_path) == 0
    assert tables.main(["--check"], tmp_path) == 0
    assert (tmp_path / "README.md").read_text().startswith("before\n<!-- table: memory-error -->\n\n| what |")
    assert page.read_text() == (ROOT / "docs/reproduction/collage-table2.md").read_text()
    assert not other.exists()
