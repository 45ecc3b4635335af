"""Tables are SQL over the recorded rows: what a query gives, what it is refused for, and how pages are filled."""

import fnmatch
import re
import statistics
import subprocess

import pytest

from tools.docs import drawing, promises, tables
from tools.docs.evidence import History, unproven
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
    covers = "covers(2, 2.1, '[[0, 9], [75, 2.5], [100, 2]]')"  # 0.02 per token at the end
    assert tables.select(f"SELECT kilo(1500), without('O3 --x 1 --y', '--x'), {covers}").cells == [["1.5k", "O3 --y", "5.0"]]
    assert tables.select("SELECT paired(2, 2.02)").cells == [["+1.00 (one seed)"]]
    pairs = "FROM (SELECT 2 AS a, 2.02 AS b UNION ALL SELECT 4, 4.08)"
    ((two, *units),) = tables.select(f"SELECT paired(a, b), paired(a, a + 0.009), paired(a, a + 0.009, 'nats per byte') {pairs}").cells
    assert two == "+1.50 (-4.85 to +7.85), 2 of 2: not shown"  # t of one degree of freedom is 12.71
    assert [cell.partition(": ")[2] for cell in units] == ["holds", "not shown"]  # 0.01 nats per token, 0.2 % of a loss per byte


@pytest.mark.parametrize(
    ("query", "word"), [('SELECT none FROM "bench/step"', "none"), ('SELECT ms FROM "bench/step" WHERE ms < 0', "row")]
)
def test_a_wrong_query_is_refused(query, word):
    with pytest.raises(ValueError, match=word):
        tables.select(query)


def test_every_marker_of_a_page_has_a_table():
    names = {match[2] for page in tables.pages(ROOT) for match in tables.MARKED.finditer(page.read_text(encoding="utf-8"))}
    assert names - {"reproduction", "as-published"} <= set(tables.specifications())


def test_a_table_of_chosen_rows_says_why():
    for name, one in tables.specifications().items():
        query = "" if name == "templates" else " ".join(value for key, value in one.items() if key not in ("chosen", "note"))
        if re.search(r"'[0-9a-f]{7,8}'|LIMIT \d\d", query):  # or cut off
            assert one["chosen"] in tables.table(name).note, name


@pytest.mark.parametrize(("name", "model"), [("summary", "1.3b"), ("steps", None), ("large-steps", None), ("data-parallel", "1.3b")])
def test_no_row_is_shown_beside_a_newer_one_of_its_case(name, model):
    """By the dates in the tables of whole steps, whose cases are rows of the files."""
    table = tables.table(name)
    for cells in (dict(zip(table.columns, row, strict=True)) for row in table.cells):
        case, preset = cells[table.columns[0]].strip("`"), cells.get("model", model)
        dates = [
            row["date"]
            for row in (row for file in table.files for row in read(file))
            if row["case"] == case and row["preset"].replace(" --fp8-min-gain 0", "") == preset.replace(" --fp8-min-gain 0", "")
            if row["gpu"] == "NVIDIA H200" and row["ms"] and row["gpus"] == ("2" if name == "data-parallel" else "1")
            if {"tp", "pp"} - row.keys() or (row["tp"], row["pp"], row["micro_batches"], row["p2p"]) == ("1", "1", "1", "on")
            if "micro-batch" not in cells or name == "large-steps" or row["micro_batch"] == cells["micro-batch"]
        ]
        assert cells["date"] == max(dates), (name, case, preset)


def test_a_baseline_is_quoted_by_its_best():
    """Ratios over O3 of the same commit and day, of medians over a call's starts: the lowest of the newest call, then of all calls."""
    calls: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in read(STEP):
        if (row["preset"], row["micro_batch"], row["gpu"]) == ("1.3b", "4", "NVIDIA H200") and row["ms"]:
            if row["ms_p20"] and float(row["ms_p80"]) >= 1.5 * float(row["ms_p20"]):
                continue  # disturbed
            calls.setdefault((row["commit"], row["date"]), {}).setdefault(row["case"], []).append(float(row["ms"]))
    medians = [{case: statistics.median(ms) for case, ms in call.items()} for call in calls.values() if {"O0", "O3"} <= call.keys()]
    fused = [call for call in medians if call["O3"] < call["O0"]]
    names = ("torchao bf16", "torchao ao-", "megatron bf16", "megatron te-")
    best = [
        [f"{min(ms / call['O3'] for call in some for case, ms in call.items() if case.startswith(name)):.2f}" for name in names]
        for some in (fused[-1:], fused)
    ]
    text = " ".join(tables.table("step-ratios").cells[0][0].split())
    assert f"{fused[-1]['O0'] / fused[-1]['O3']:.2f} times as fast" in text
    quoted = re.findall(r"(?<= )(\d\.\d\d)(?= times as long| times \(| times in BF16| in FP8|,| and|\.)", text)
    assert quoted == [*best[0], *best[1]]


def test_every_file_of_measurements_has_its_program_in_the_tree_or_in_a_commit():
    page = (ROOT / "docs/results/commands.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\S+\.csv)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    folders = [ROOT / "tools" / name / "results" for name in ("bench", "reproduce")]
    files = [path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*.csv")]
    assert set(files) == {file for pattern in named for file in fnmatch.filter(files, pattern)}
    assert [pattern for pattern in named if not fnmatch.filter(files, pattern)] == []
    for name in re.findall(r"`((?:[0-9a-f]{8}:)?\w+/[\w/]+\.(?:py|sh))`", page):
        found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", name], capture_output=True, check=False).returncode == 0
        assert (ROOT / name).is_file() or (":" in name and (found or not History.of(ROOT).whole)), name


@pytest.mark.parametrize(("text", "word"), [("<!-- table: nonsense -->\n<!-- end -->\n", "nonsense"), ("<!-- table: steps -->\n", "end")])
def test_a_wrong_marker_is_refused(text, word):
    with pytest.raises(ValueError, match=word):
        tables.filled(text, "page.md")


def test_a_picture_is_current_until_its_numbers_change(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"panels": {"": {"a": [[1.0, 2.0], [3.0, 2.0]]}}, "x": "step", "y": "loss", "log": "x"}
    bars = {"groups": {"GPT": {"torch": 1.0, "ours": 1.5}}, "x": "speed"}
    for name, numbers in (("curves", curves), ("bars", bars)):
        path = tmp_path / f"{name}.png"
        assert not drawing.is_current(numbers, path)
        drawing.draw(numbers, path)
        assert drawing.is_current(numbers, path)
        assert not drawing.is_current(numbers | {"other": 1}, path)


# Rows that may be published: their commits are in the history, or the rows say that they are not.
KNOWN = "0123456789abcdef0123456789abcdef01234567"
WHOLE, SHALLOW = History(frozenset([KNOWN]), True), History(frozenset(), False)


def test_known_commits_and_marked_rows_are_published_and_a_shallow_clone_lists_what_it_could_not_check():
    assert unproven(["0123456", "0123456+", "fffffff+", "fffffff?"], "step.csv", WHOLE) == []
    assert unproven(["0123456", "fffffff"], "step.csv", SHALLOW) == ["step.csv: 0123456", "step.csv: fffffff"]


@pytest.mark.parametrize(("commit", "history"), [("fffffff", WHOLE), ("unknown", WHOLE), ("0", WHOLE), ("", WHOLE), ("", SHALLOW)])
def test_an_unknown_commit_is_refused_by_name_and_a_row_without_one_in_any_clone(commit, history):
    with pytest.raises(ValueError, match=commit or "step"):
        unproven([commit], "step.csv", history)


def test_whole_shallow_and_absent_histories_are_told_apart(tmp_path):
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert not History.of(tmp_path / "nowhere").whole
    git("init", "-q", "full")
    for name in "ab":
        git("-C", "full", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", name)
    first, last = (git("-C", "full", "rev-parse", name) for name in ("HEAD~1", "HEAD"))
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}/full", "shallow")
    full, shallow = History.of(tmp_path / "full"), History.of(tmp_path / "shallow")
    assert full.whole
    assert full.knows(first[:7])
    assert not shallow.whole
    assert (shallow.knows(first[:7]), shallow.knows(last[:7])) == (False, True)


# The page of promises, from a small tree of tests.
TEST = "import pytest\n\n\n@pytest.mark.promise({})\n@pytest.mark.nightly\ndef test_{}():\n    pass\n"


def write(root, name: str, *markers: str) -> None:
    file = root / "tests" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(TEST.format(marker, number) for number, marker in enumerate(markers)))


def test_promises_are_listed_by_section_with_their_tests(tmp_path):
    write(tmp_path, "b/test_b.py", '"Data", "It is read."', '"Checkpoints", "It is saved."')
    write(tmp_path, "test_a.py", '"Data", "It is kept."')
    lines = [line for line in promises.page(tmp_path).splitlines() if line.startswith(("## ", "- "))]
    assert lines == [
        "## Checkpoints",
        "- It is saved. `tests/b/test_b.py::test_1`",
        "## Data",
        "- It is read. `tests/b/test_b.py::test_0`",
        "- It is kept. `tests/test_a.py::test_0`",
    ]


@pytest.mark.parametrize("marker", ['"Data"', '"Data", TEXT', '"Data", "One.", "Two."'])
def test_a_marker_of_another_form_is_refused_with_its_line(tmp_path, marker):
    write(tmp_path, "test_a.py", marker)
    with pytest.raises(ValueError, match=r"tests/test_a\.py:4: promise takes a section and a sentence"):
        promises.page(tmp_path)


def test_one_sentence_on_two_tests_is_refused(tmp_path):
    write(tmp_path, "test_a.py", '"Data", "It is read."', '"Data", "It is read."')
    with pytest.raises(ValueError, match="and so does another test"):
        promises.promises(tmp_path)
