"""Steps of a mixture of experts: cases as flags, and ratios that are those of the rows."""

from tools.docs import experts
from tools.docs.cells import pick


def test_cases_are_flags_of_the_trainer_and_cards_are_counted():
    row = {"case": "O3, two cards, EP 2, --moe-wire fp8-sums, mock data"}
    assert (experts.what(row), experts.cards(row)) == ("`O3 --expert-model-parallel-size 2 --moe-wire fp8-sums`", 2)
    assert (experts.what({"case": "O0, mock data"}), experts.cards({"case": "O0, mock data"})) == ("`O0`", 1)
    assert experts.what({"case": "O3, two cards, DP 2, mock data"}) == "`O3`"


def test_each_line_is_over_one_card():
    table = experts.steps()
    rows = {row["case"].removesuffix(experts.GRAPHED): float(row["tokens_s"]) for row in pick(experts.MOE, experts.graphed)}
    lines = {(line[0], line[1]): line[3:5] for line in table.cells}
    assert len(lines) == len(table.cells) == len(rows)
    assert lines["`O0`", "1 x H200"] == ["1.00", "100"]
    assert lines["`O3`", "1 x H200"] == [f"{rows['O3'] / rows['O0']:.2f}", "100"]
    two = rows["O3, two cards, EP 2"] / 2
    assert lines["`O3 --expert-model-parallel-size 2`", "2 x H200"] == [f"{two / rows['O0']:.2f}", f"{100 * two / rows['O3']:.0f}"]
