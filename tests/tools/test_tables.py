"""`make tables`: what is published is what the rows say, and what is stale is found."""

import functools
import json
import shutil

import pytest

from tools import tables
from tools.docs.cells import Absent, Listing
from tools.docs.evidence import ROOT


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Every table, figure and page follows from committed files alone: they are made once for all tests (half a minute of computing)."""
    figures = {name: functools.cache(make) for name, make in tables.figures().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "TABLES", {name: functools.cache(make) for name, make in tables.TABLES.items()})
        patch.setattr(tables, "figures", lambda: figures)
        for module, name in (
            (tables.reproduction, "pages"),
            (tables.precisions, "pages"),
            (tables.promises, "page"),
            (tables.listing, "page"),
        ):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.mark.parametrize("name", sorted(tables.listed.TABLES | tables.planner.TABLES))
def test_every_table_is_whole_and_names_its_source(name):
    table = tables.TABLES[name]()
    if isinstance(table, Absent):
        assert not (ROOT / table.file).exists()
        return
    text = table.markdown()
    if isinstance(table, Listing):
        assert len(table.lines) >= 1
        assert text == "```text\n" + "\n".join(table.lines) + "\n```"
        return
    assert table.cells
    assert {len(cells) for cells in table.cells} == {len(table.columns)}
    assert all(f"`{file}`" in text.replace("\n", " ") for file, _ in table.sources)
    assert table.sources or table.footer in text.replace("\n", " ")


@pytest.mark.promise("Tools", "Every published number is computed from the measurements.")
def test_what_is_published_is_what_the_rows_say(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def published(tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for folder in (tables.FIGURE_FOLDER, "docs/reproduction", "docs/reference/precisions"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs/reference").mkdir(exist_ok=True)
    for page in ("promises.md", "megatron_flags.md"):
        shutil.copy(ROOT / "docs/reference" / page, tmp_path / "docs/reference")
    (tmp_path / "README.md").write_text("before\n<!-- table: memory-error -->\n<!-- end -->\nafter\n")
    return tmp_path


def test_a_stale_table_is_found_and_written(tmp_path, capsys):
    root = published(tmp_path)
    assert tables.main(["--check"], root) == 1
    assert "stale: README.md; run make tables" in capsys.readouterr().out
    assert tables.main([], root) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n<!-- table: memory-error -->\n\n| what |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert tables.main(["--check"], root) == 0
    (root / "README.md").write_text(text.replace("| peak |", "| peek |"))
    assert tables.main(["--check"], root) == 1


def test_a_figure_of_other_numbers_is_found_and_a_picture_of_other_bytes_is_not(tmp_path, capsys):
    root = published(tmp_path)
    assert tables.main([], root) == 0
    (root / tables.FIGURE_FOLDER / "fig7.png").write_bytes(b"drawn by another matplotlib")
    assert tables.main(["--check"], root) == 0
    kept = root / tables.FIGURE_FOLDER / "fig7.json"
    numbers = json.loads(kept.read_text())
    numbers["snr_db"]["auto-halve-in-sample"][0] += 0.01
    kept.write_text(json.dumps(numbers))
    assert tables.main(["--check"], root) == 1
    assert "stale: docs/results/figures/fig7.png" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "told"), [
    ("<!-- table: nonsense -->\n<!-- end -->\n", "README.md names the unknown table 'nonsense': the tables are"),
    ("<!-- table: steps -->\n", "README.md has a marker <!-- table: NAME --> without <!-- end -->"),
])  # fmt: skip
def test_a_wrong_marker_is_refused(tmp_path, capsys, text, told):
    root = published(tmp_path)
    (root / "README.md").write_text(text)
    assert tables.main([], root) == 2
    assert told in capsys.readouterr().err
    assert (root / "README.md").read_text() == text


def test_the_page_of_an_entry_that_is_changed_or_gone_is_made_whole_or_removed(tmp_path, capsys):
    root = published(tmp_path)
    assert tables.main([], root) == 0
    page = root / "docs" / "reproduction" / "collage-table2.md"
    page.write_text(page.read_text().replace("12", "11"))
    (page.parent / "fp8lm-table99.md").write_text("of an entry that is gone")
    capsys.readouterr()
    assert tables.main(["--check"], root) == 1
    assert "stale: docs/reproduction/collage-table2.md, docs/reproduction/fp8lm-table99.md;" in capsys.readouterr().out
    assert tables.main([], root) == 0
    assert page.read_text() == (ROOT / "docs/reproduction/collage-table2.md").read_text()
    assert not (page.parent / "fp8lm-table99.md").exists()
