"""Tables of stochastic rounding, against the rows read by hand, and the sentences that state them."""

import statistics

import pytest

from megatron.lm.evaluation.paired_difference import EFFECT
from tests.tools.docs.test_losses import last
from tools.docs import rounding
from tools.docs.evidence import ROOT

SEEDS = range(8)
T7 = 2.364624  # Student's t of 97.5 % at 7 degrees of freedom
CURVES = f"{rounding.FOLDER}/curves.csv"


def run(level: str, how: str) -> str:
    return f"{level}-master-rounding-{how}-moment-rounding-{how}"


def percent(number: float) -> str:
    return f"{number:+.2f}"


def test_the_short_form_of_losses_has_the_default_rounding_alone():
    short, whole = rounding.default_loss(), rounding.loss()
    assert [cells[0] for cells in short.cells] == ["`bf16`", *(f"`{level}`" for level in rounding.LEVELS)]
    for cells in short.cells[1:]:
        line = next(line for line in whole.cells if line[:2] == [cells[0], "stochastic"])
        assert cells[-1] == line[-2]
    assert short.sources == whole.sources


@pytest.mark.parametrize("level", rounding.LEVELS)
def test_losses_are_paired_by_seed_with_a_95_percent_interval(level):
    by_hand = [last(CURVES, f"{run(level, 'stochastic')}_{n}") / last(CURVES, f"{run(level, 'nearest')}_{n}") - 1 for n in SEEDS]
    mean, width = statistics.fmean(by_hand), T7 * statistics.stdev(by_hand) / 8**0.5
    line = next(cells for cells in rounding.loss().cells if cells[:2] == [f"`{level}`", "stochastic"])
    assert line[2] == "8"
    assert line[-1] == f"{percent(100 * mean)} ({percent(100 * (mean - width))} to {percent(100 * (mean + width))})"


@pytest.mark.parametrize("level", rounding.LEVELS)
def test_nearest_ends_above_bf16_and_stochastic_below_nearest_by_less_than_the_effect(level):
    """What the pages say of the eight seeds."""
    base = f"{level} {rounding.flags('nearest')}"
    from_bf16 = rounding.difference(base, "bf16")
    stochastic = rounding.difference(f"{level} {rounding.flags('stochastic')}", "bf16")
    gained = rounding.difference(f"{level} {rounding.flags('stochastic')}", base)
    assert from_bf16.ends[0] > 0
    assert stochastic.ends[0] < 0 < stochastic.ends[1]
    assert gained.ends[1] < 0
    assert all(max(map(abs, found.ends)) < EFFECT for found in (from_bf16, stochastic, gained))
    assert all(found.half_width < 0.003 for found in (from_bf16, stochastic, gained))


def test_a_tree_without_a_name_is_refused_and_a_case_without_flags_has_the_default():
    with pytest.raises(ValueError, match="without --tree before=FOLDER: name the tree's folder after its commit"):
        rounding.tree_before({"command": "side_by_side.py --cases 'now O2'"})
    assert rounding.roundings("O2") == ("stochastic", "stochastic")
    assert rounding.roundings("O2 --master-rounding nearest --moment-rounding stochastic") == ("nearest", "stochastic")


def test_the_cost_of_the_default_is_that_of_the_rows_and_is_in_the_pages_that_state_speeds():
    costs = {level: rounding.slower(level, "step") for level in rounding.LEVELS}
    assert all(cost < 1.0 for cost in costs.values())
    assert all(rounding.slower(level, "update") < 5.0 for level in rounding.LEVELS)
    assert f"by {costs['O2']:+.1f} % at O2 and {costs['O3']:+.1f} % at O3" in " ".join(rounding.cost().markdown().split())
    for page in ("docs/results/results.md",):
        assert "<!-- table: rounding-cost -->" in (ROOT / page).read_text(encoding="utf-8"), page


def test_shares_of_small_updates_are_those_of_the_rows():
    table = rounding.small_updates()
    assert table.columns[2:] == [f"{level} {how}" for level in ("O1", "O2", "O3") for how in ("nearest", "stochastic")]
    assert table.cells[2][:4] == ["0.02", "3e-06", "0.35", "0.96"]
    shares = {column: [float(line[n]) for line in table.cells] for n, column in enumerate(table.columns) if n > 1}
    assert min(shares["O1 stochastic"] + shares["O2 stochastic"]) > 0.93
    assert max(shares["O1 nearest"][2:] + shares["O2 nearest"][2:]) < 0.5


def test_fine_tuning_at_small_rates_is_as_its_page_says():
    """Seeds in pairs; own layers against O0, exports against O0 and against nearest rounding."""
    for level in rounding.LEVELS:
        base, case = (f"{level} {rounding.flags(how)}" for how in ("nearest", "stochastic"))
        assert len(rounding.of_seeds("sft", case, "bf16_loss")) == 3
        assert rounding.tuned("sft", case, base).ends[1] < 0
        assert rounding.tuned("sft", case, "O0").ends[0] > 0
        assert rounding.tuned("sft", base, "O0").ends[0] > 0
        assert rounding.tuned("sft", case, "O0", "own_loss").ends[1] < 0
    by_level = {
        level: rounding.tuned("dpo", f"{level} {rounding.flags('stochastic')}", f"{level} {rounding.flags('nearest')}")
        for level in rounding.LEVELS
    }
    assert by_level["O2"].ends[0] < 0 < by_level["O2"].ends[1]
    assert by_level["O3"].ends[1] < 0
