"""Outliers and the guard: each line is of its row, and the guard's cost is over the level alone."""

from tools.docs import outliers
from tools.docs.cells import pick


def test_the_losses_are_those_of_the_rows():
    table, rows = outliers.losses(), pick(outliers.LOSSES)
    assert len(table.cells) == len(rows)
    for line, row in zip(table.cells, rows, strict=True):
        assert line[1] == f"`{row['case']}`"
        assert line[3] == f"{float(row['loss']):.3f}"
    assert {line[0].removesuffix(" †") for line in table.cells} == {"from step 200", "from step 150 to 350"}


def test_remedies_are_compared_with_bf16_of_the_same_seed():
    cells = {line[0]: line for line in outliers.remedies().cells}
    rows = {(row["case"], row["factor"] == "1", row["preset"]): float(row["loss"]) for row in pick(outliers.TOY)}
    case = "O3 --grad-format bf16 --smooth-swiglu"
    apart = [loss / rows["bf16", False, flags] - 1 for (name, _, flags), loss in rows.items() if name == case]
    assert cells[f"`{case}`"][3].startswith(f"{100 * sum(apart) / len(apart):+.2f} (")
    assert cells["`O3 --grad-format bf16`"][2] != cells["`O3 --grad-format bf16`, no outliers"][2]
    assert cells["`bf16`"][3:] == ["", ""]


def test_the_guards_cost_is_over_the_level_alone():
    cells = {(line[0], line[1].strip("`")): line for line in outliers.times().cells}
    ms = {row["case"]: float(row["ms"]) for row in pick(outliers.TIMES, lambda row: row["preset"].startswith("125m"))}
    measured = "O3 --fp8-guard --fp8-guard-interval 1"
    assert cells["GPT-125M", measured][3] == f"{100 * (ms[measured] / ms['O3'] - 1):+.1f}"
    assert cells["GPT-125M", "O3"][3] == ""
    again = [float(row["ms"]) for row in pick(outliers.TIMES, lambda row: row["preset"].startswith("1.3b") and row["case"] == "O3")]
    assert len(again) == 2
    assert cells["GPT-1.3B", "O3"][2] == f"{sum(again) / 2:.1f}"


def test_a_continued_model_is_compared_with_bf16_of_the_same_seeds():
    table, rows = outliers.continued(), pick(outliers.CONTINUED)
    by_case = {cells[0].strip("`"): cells for cells in table.cells}
    own = {(row["case"], row["seed"]): float(row["own"]) for row in rows}
    seeds = [seed for case, seed in own if case == "O2"]
    mean = sum(own["O2", seed] / own["O0", seed] - 1 for seed in seeds) / len(seeds)
    assert by_case["O2"][1] == str(len(seeds))
    assert by_case["O2"][3].startswith(f"{100 * mean:+.2f} (")
    assert by_case["O0"][3].endswith(" nats")
