"""Pages of the reproduced tables and figures, against rows made by hand."""

from dataclasses import replace

import pytest

from tools.docs import reproduction
from tools.reproduce import keep
from tools.reproduce.registry import ENTRIES

ROW = dict.fromkeys(keep.COLUMNS, "") | {
    "size": "toy", "piece": "whole", "seconds": "1.5", "command": "python -m tools.reproduce collage-table1 --size toy",
    "date": "2026-11-23", "commit": "0123456", "gpu": "cpu", "torch": "2.13.0",
}  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A checkout in which one entry has rows: collage-table6, of whose six pieces one is there."""
    rows = [
        ROW | {"piece": "beta2 0.999", "quantity": "a, ratio", "ours": "1.1", "paper": "1", "seed": "7"},
        ROW | {"piece": "beta2 0.999", "quantity": "a, curve", "x": "1", "ours": "3", "seed": "7"},
        ROW | {"piece": "beta2 0.999", "quantity": "a, curve", "x": "2", "ours": "2", "seed": "7"},
        ROW | {"piece": "beta2 0.999", "quantity": "a, curve", "x": "2", "ours": "9", "seed": "8"},
    ]
    keep.write(tmp_path / keep.RESULTS / "collage-table6.csv", rows)
    write_words(tmp_path, {"collage-table6": 'verdict = "holds in part"\nsize = "toy"\nagree = "The order agrees."\ncause = "Size."'})
    reproduction.words.cache_clear()
    yield tmp_path
    reproduction.words.cache_clear()


def write_words(root, given):
    (root / "tools/reproduce").mkdir(parents=True, exist_ok=True)
    lines = [f"[{name}]\n{given.get(name, 'verdict = ' + chr(34) + 'not run' + chr(34))}\n" for name in ENTRIES]
    (root / reproduction.WORDS).write_text("\n".join(lines))


def test_a_page_has_ours_the_papers_the_difference_the_words_and_what_is_missing(root):
    pages = reproduction.pages(root)
    assert list(pages) == ["docs/reproduction/collage-table6.md"]
    text = pages["docs/reproduction/collage-table6.md"]
    for part in (
        "# Collage, Table 6",
        "**holds in part**",
        "The order agrees.",
        "Likely cause: Size.",
        "| a, ratio | 1.1 | 1 | +10.0 % |  | 7 |",
        "Missing: `beta2 0.99`, `beta2 0.95`, `beta2 0.999, twice the batch`, `beta2 0.99, twice the batch`, `beta2",
        "![Collage, Table 6](../results/figures/collage-table6.png)",
        "commit 0123456, cpu, 2.13.0, 2026-11-23",
        ROW["command"],
    ):
        assert part in text
    assert "a, curve" not in text


def test_the_largest_size_that_has_rows_is_shown(root):
    file = root / keep.RESULTS / "collage-table6.csv"
    keep.write(file, [*keep.read(file), ROW | {"size": "small", "piece": "beta2 0.99", "quantity": "a, ratio", "ours": "1.3"}])
    write_words(root, {"collage-table6": 'verdict = "holds"\nsize = "small"'})
    reproduction.words.cache_clear()
    text = reproduction.pages(root)["docs/reproduction/collage-table6.md"]
    assert "| a, ratio | 1.3 |" in text
    assert "1.1" not in text


def test_curves_are_of_one_seed():
    rows = [
        ROW | {"quantity": "a, loss", "x": x, "ours": y, "seed": seed} for x, y, seed in (("1", "3", "7"), ("2", "2", "7"), ("1", "9", "8"))
    ]
    assert reproduction.curves(rows) == {"a, loss": [[1.0, 2.0], [3.0, 2.0]]}


@pytest.mark.parametrize(
    ("ours", "paper", "unit", "told"),
    [
        ("1.1", "1", "GiB", "+10.0 %"),
        ("47.25", "29", "%", "+18.2"),
        ("3", "0", "", "+3"),
        ("fits", "fits", "", "same"),
        ("fits", "does not fit", "", "differs"),
        ("0.475", "diverges", "", "differs in kind"),
        ("1", "", "", ""),
        ("not measured", "34.2", "%", ""),
    ],
)
def test_differences(ours, paper, unit, told):
    assert reproduction.difference({"ours": ours, "paper": paper, "unit": unit}) == told


def test_words_of_another_size_and_words_without_rows_are_refused(root):
    for words in ('verdict = "holds"\nsize = "small"', 'verdict = "not run"\nsize = "toy"', 'verdict = "holds"'):
        write_words(root, {"collage-table6": words})
        reproduction.words.cache_clear()
        with pytest.raises(ValueError, match="compare them with the rows, and set the size"):
            reproduction.pages(root)


@pytest.mark.parametrize(
    ("text", "told"), [('[nothing]\nverdict = "holds"\n', "differ in"), (None, "the verdict 'perhaps' of collage-table6 is invalid")]
)
def test_words_that_are_none_are_refused(root, text, told):
    write_words(root, {"collage-table6": 'verdict = "perhaps"'})
    if text:
        (root / reproduction.WORDS).write_text(text)
    reproduction.words.cache_clear()
    with pytest.raises(ValueError, match=told):
        reproduction.pages(root)


LOSSES = {"bf16": {"1": 5.0, "2": 5.1, "3": 4.9}, "O3": {"1": 5.01, "2": 5.11, "3": 4.91}}


def loss_entry(monkeypatch, root, verdict, losses, name="collage-table6"):
    """An entry about a loss, with rows by seed, and its verdict."""
    one = replace(ENTRIES[name], same_loss=(("bf16: validation loss", "O3: validation loss"),))
    monkeypatch.setattr(reproduction, "ENTRIES", {**ENTRIES, name: one})
    rows = [ROW | {"size": "small", "piece": piece, "quantity": f"{run}: validation loss", "ours": str(loss), "seed": seed, "paper": ""}
            for run, by_seed in losses.items() for seed, loss in by_seed.items() for piece in one.pieces("small")[:1]]  # fmt: skip
    keep.write(root / keep.RESULTS / f"{name}.csv", rows)
    write_words(root, {name: f'verdict = "{verdict}"\nsize = "small"'})
    reproduction.words.cache_clear()
    return one


def test_holds_about_a_loss_states_the_interval(monkeypatch, root):
    one = loss_entry(monkeypatch, root, "holds", LOSSES)
    text = reproduction.page(one, root)
    assert "- O3 against bf16: +0.0100 nats per token, +0.20 % (95 % interval +0.19 to +0.21 %), 3 seeds: the losses are equal" in text


@pytest.mark.promise("Tools", "A reproduced claim about a loss holds only if the interval is within the effect.")
@pytest.mark.parametrize(
    "losses",
    [{"bf16": LOSSES["bf16"], "O3": {"1": 5.06, "2": 5.05, "3": 4.95}}, {"bf16": {"1": 5.0}, "O3": {"1": 5.0}}, {"bf16": {"1": 5.0}}],
)
def test_holds_is_refused_where_the_interval_is_wider_than_the_effect_or_there_is_none(monkeypatch, root, losses):
    one = loss_entry(monkeypatch, root, "holds", losses)
    with pytest.raises(
        ValueError, match=r"the 95 % interval of 'O3: validation loss' is not within 0\.6 % of its baseline: write 'too small"
    ):
        reproduction.page(one, root)
    text = reproduction.page(loss_entry(monkeypatch, root, "too small to say", losses), root)
    assert ("too small to say whether" in text) == (len(losses.get("O3", {})) > 1)


def test_every_published_holds_about_a_loss_has_its_pairs():
    """A page that compares losses and says that the claim holds must say of which pairs, or it has no interval."""
    compared = ("validation loss", "held-out loss", "perplexity over")
    for name, one in ENTRIES.items():
        _, rows, _ = reproduction.published(one)
        if reproduction.words()[name].verdict == "holds" and any(what in row["quantity"] for row in rows for what in compared):
            assert one.same_loss, name
            assert len(keep.loss_differences(one, rows)) == len(one.same_loss), name
    told = {name: reproduction.words()[name].verdict for name, one in ENTRIES.items() if one.same_loss}
    assert told.keys() >= {"fp8lm-figure4", "fp8lm-table6", "collage-table5", "coat-loss"}


def test_the_overview_has_a_line_for_each_entry_and_a_verdict_in_each():
    table = reproduction.overview()
    assert len(table.cells) == len(ENTRIES)
    assert all(cells[-1].partition(";")[0] in reproduction.VERDICTS for cells in table.cells)
    assert all(cells[2] for cells in table.cells)
    headlines = {one.headline for one in ENTRIES.values()}
    assert all(cells[2] in headlines and cells[4] for cells in table.cells if not cells[-1].startswith("not run"))


def test_many_curves_have_a_panel_for_each_thing_they_tell_of():
    line = [[1.0, 2.0], [3.0, 4.0]]
    few = {"a, loss": line, "b, loss": line}
    assert reproduction.panels_of(few) == {"loss": {"a": line, "b": line}}
    of_two = {f"{label}, {what}": line for what in ("beta2 0.9, loss", "loss") for label in "ab"}
    assert reproduction.panels_of(of_two) == {"": of_two}
    many = {f"{label}, {what}": line for what in ("beta2 0.9, loss", "loss") for label in "abcde"}
    assert reproduction.panels_of(many) == {what: dict.fromkeys("abcde", line) for what in ("beta2 0.9, loss", "loss")}
