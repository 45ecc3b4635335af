"""Tables are SQL over the recorded rows: what a query gives, what it is refused for, and how pages are filled."""

import statistics

import pytest

from tools.docs import drawing, tables
from tools.measurements import ROOT, read

STEP = "tools/bench/results/step.csv"


def test_a_table_has_its_columns_files_and_places():
    table = tables.select("""SELECT "case", fixed(ms, 1) AS "ms/step", kilo(tokens_s_gpu) AS speed, at("commit", gpu, torch, date) AS _
        FROM "bench/step" WHERE "commit" = 'd77a990' AND "case" = 'O3' AND preset = '1.3b'
        AND micro_batch = '4' """)
    (row,) = [
        row for row in read(STEP) if (row["commit"], row["case"], row["preset"], row["micro_batch"]) == ("d77a990", "O3", "1.3b", "4")
    ]
    assert table.cells == [["O3", f"{float(row['ms']):.1f}", f"{int(row['tokens_s_gpu']) / 1000:.1f}k"]]
    text = table.markdown()
    assert text.startswith("| case | ms/step | speed |\n| --- | --- | --- |\n| O3 | ")
    assert text.endswith(f"`{STEP}`, commit d77a990, {row['gpu']}, {row['torch']}, {row['date']}.")


def test_rows_on_no_known_tree_are_marked():
    table = tables.select("""SELECT 'a' AS b, at('0123456+', 'cpu', '2', 'd') AS _ FROM "bench/step" LIMIT 1""")
    assert table.cells == [["a" + tables.MARK]]
    assert "not in the history" in table.markdown()


def test_aggregates():
    (cells,) = tables.select("""SELECT median(ms), count(*) FROM "bench/step" WHERE "case" = 'O3' """).cells
    values = [float(row["ms"]) for row in read(STEP) if row["case"] == "O3"]
    assert (float(cells[0]), int(cells[1])) == (statistics.median(values), len(values))
    ((one,),) = tables.select("SELECT paired(a, b) FROM (SELECT 2 AS a, 2.02 AS b)").cells
    ((two,),) = tables.select("SELECT paired(a, b) FROM (SELECT 2 AS a, 2.02 AS b UNION ALL SELECT 4, 4.08)").cells
    assert one == "+1.00 (one seed)"
    assert two == "+1.50 (-4.85 to +7.85)"  # t of one degree of freedom is 12.71


@pytest.mark.parametrize(
    ("query", "word"), [('SELECT none FROM "bench/step"', "none"), ('SELECT ms FROM "bench/step" WHERE ms < 0', "row")]
)
def test_a_wrong_query_is_refused(query, word):
    with pytest.raises(ValueError, match=word):
        tables.select(query)


def test_every_marker_of_a_page_has_a_table():
    names = {match[2] for page in tables.pages(ROOT) for match in tables.MARKED.finditer(page.read_text(encoding="utf-8"))}
    assert names - {"reproduction"} <= set(tables.specifications())


@pytest.mark.parametrize(("text", "word"), [("<!-- table: nonsense -->\n<!-- end -->\n", "nonsense"), ("<!-- table: steps -->\n", "end")])
def test_a_wrong_marker_is_refused(text, word):
    with pytest.raises(ValueError, match=word):
        tables.filled(text, "page.md")


def test_a_picture_is_current_until_its_numbers_change(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"panels": {"": {"a": [[1.0, 2.0], [3.0, 2.0]]}}, "x": "step", "y": "loss", "log": "x"}
    bars = {"models": {"GPT": {"names": ["O0", "O3, CUDA graphs"], "tokens_s": [1000, 2000], "peak_gib": [3.0, 2.0]}}}
    for name, numbers in (("curves", curves), ("bars", bars)):
        path = tmp_path / f"{name}.png"
        assert not drawing.is_current(numbers, path)
        drawing.draw(numbers, path)
        assert drawing.is_current(numbers, path)
        assert not drawing.is_current(numbers | {"other": 1}, path)
