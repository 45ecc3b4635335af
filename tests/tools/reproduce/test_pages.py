"""Pages of the reproduced tables and figures, against rows made by hand."""

from dataclasses import replace

import pytest

from tools.reproduce import keep, pages
from tools.reproduce.entry import BY_LOSSES, ENTRIES

ROW = dict.fromkeys(keep.COLUMNS, "") | {
    "size": "toy", "piece": "whole", "seconds": "1.5", "command": "python -m tools.reproduce collage-table1 --size toy",
    "date": "2026-11-23", "commit": "0123456", "gpu": "cpu", "torch": "2.13.0",
}  # fmt: skip
ONE = replace(
    ENTRIES["collage-table6"],
    verdict="holds in part",
    judged="toy",
    agree="The order agrees.",
    cause="Size.",
    setting="A GPT.",
    limits="One.",
)


@pytest.fixture
def root(tmp_path):
    """A checkout in which one piece of six of collage-table6 has rows."""
    rows = [
        ROW | {"piece": "beta2 0.999", "quantity": "a, ratio", "ours": "1.1", "paper": "1", "seed": "7"},
        *(
            ROW | {"piece": "beta2 0.999", "quantity": "a, curve", "x": x, "ours": y, "seed": seed}
            for x, y, seed in (("1", "3", "7"), ("2", "2", "7"), ("2", "9", "8"))
        ),
    ]
    keep.write(tmp_path / keep.RESULTS / "collage-table6.csv", rows)
    return tmp_path


def test_a_page_has_setting_and_limits_apart_and_ours_beside_the_papers(root):
    text = pages.page(ONE, root)
    for part in ("# Collage, Table 6", "**holds in part**", "Likely cause: Size.", "How it was measured: A GPT.", "Limits: One.",
                 "| a, ratio | 1.1 | 1 | +10.0 % |  | 7 |", "Missing: `beta2 0.99`", "commit 0123456", ROW["command"]):  # fmt: skip
        assert part in text
    assert "a, curve" not in text


def test_curves_of_several_seeds_have_a_mean_and_a_band_where_all_have_a_value(root):
    rows = keep.read(root / keep.RESULTS / "collage-table6.csv")
    assert pages.curves(rows) == {"a, curve": [[2], [5.5], [2], [9]]}
    assert pages.curves(rows[:3]) == {"a, curve": [[1, 2], [3, 2]]}


def test_the_largest_size_that_has_rows_is_shown(root):
    file = root / keep.RESULTS / "collage-table6.csv"
    keep.write(file, [*keep.read(file), ROW | {"size": "small", "piece": "beta2 0.99", "quantity": "a, ratio", "ours": "1.3"}])
    text = pages.page(replace(ONE, judged="small"), root)
    assert "| a, ratio | 1.3 |" in text
    assert "1.1" not in text


@pytest.mark.parametrize(
    ("ours", "paper", "unit", "difference"),
    [("1.1", "1", "GiB", "+10.0 %"), ("47.25", "29", "%", "+18.2"), ("3", "0", "", "+3"), ("fits", "fits", "", "same"),
     ("fits", "does not fit", "", "differs"), ("1", "", "", ""), ("not measured", "1", "", "")],
)  # fmt: skip
def test_differences(ours, paper, unit, difference):
    assert pages.difference({"ours": ours, "paper": paper, "unit": unit}) == difference


@pytest.mark.parametrize("change", [{"judged": "small"}, {"judged": ""}, {"verdict": "not run"}])
def test_a_verdict_on_other_rows_is_refused(root, change):
    with pytest.raises(ValueError, match="collage-table6"):
        pages.page(replace(ONE, **change), root)


LOSSES = {"bf16: loss": {"1": 5.0, "2": 5.1, "3": 5.2}, "O3: loss": {"1": 5.001, "2": 5.101, "3": 5.202}}
FAR = LOSSES | {"O3: loss": {"1": 5.1, "2": 5.0, "3": 5.4}}


@pytest.mark.promise("Tools", "A reproduced claim about a loss holds only if the interval is within the margin.")
@pytest.mark.parametrize(("losses", "holds"), [(LOSSES, True), (FAR, False)])
def test_holds_is_refused_where_the_interval_of_a_loss_is_too_wide(tmp_path, losses, holds):
    one = replace(ONE, verdict="holds", same_loss=(("bf16: loss", "O3: loss"),))
    rows = [ROW | {"quantity": name, "ours": str(loss), "seed": seed} for name, seeds in losses.items() for seed, loss in seeds.items()]
    keep.write(tmp_path / keep.RESULTS / "collage-table6.csv", rows)
    ends = [line.split("; ")[-1].split(" are ")[0] for line in keep.loss_sentences(one, [*rows[:-1], rows[-1] | {"commit": "89abcde"}])]
    assert ends == ["1 of 3 pairs compare runs of two commits", "For 1 of 1 no held-out losses by step"]
    if holds:
        assert "O3: loss against bf16: loss" in pages.page(one, tmp_path)
    else:
        with pytest.raises(ValueError, match="interval"):
            pages.page(one, tmp_path)
        assert pages.page(replace(one, verdict="not shown"), tmp_path)


@pytest.mark.parametrize(
    ("others", "verdict"),
    [([0.001, 0.001, 0.002], "holds"), ([0.1, -0.1, 0.2], "not shown"), ([0.1, 0.1, 0.11], "does not hold"), ([], "holds in part")],
)
def test_a_claim_of_equal_losses_alone_is_judged_by_its_pairs(others, verdict):
    pairs = [("bf16: loss", f"O{level}: loss") for level in (2, 3)]
    runs = {"bf16: loss": [0, 0, 0], "O2: loss": others or [0.1, -0.1, 0.2], "O3: loss": others or [0, 0.001, 0.001]}
    rows = [ROW | {"quantity": name, "ours": 5 + d, "seed": seed} for name, apart in runs.items() for seed, d in enumerate(apart)]
    assert keep.verdict(replace(ONE, verdict=BY_LOSSES, same_loss=pairs), rows) == verdict
    assert keep.verdict(replace(ONE, verdict="holds in part", same_loss=pairs), rows) == "holds in part"
    name, end = (" at TP 2: validation loss", " at DP 2: validation loss")
    kinds = [row | {"quantity": row["quantity"].replace(": loss", name)} for row in rows]
    kinds += [ROW | {"quantity": f"{run}{end}", "ours": ours, "seed": "1"} for run, ours in (("bf16", 5), ("O3", 5.1))]
    two = [*([run.replace(": loss", name) for run in pair] for pair in pairs), [f"bf16{end}", f"O3{end}"]]
    assert keep.verdict(replace(ONE, verdict=BY_LOSSES, same_loss=two), kinds) == f"TP 2: {verdict}; DP 2: not shown"
