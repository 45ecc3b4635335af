"""The planner's published tables and figure."""

from tools.bench import check_plan
from tools.docs import planner


def test_every_row_outside_a_limit_is_listed_with_a_cause():
    cells = planner.outside().cells
    late = [one for one in check_plan.compared() if abs(one.time_error) > check_plan.TIME_LIMIT]
    assert len(cells) >= len(late)
    assert all(line[-1] not in ("", "not known") for line in cells)


def test_the_summary_counts_every_row():
    numbers = [int(line[2]) for line in planner.summary().cells if line[1] == check_plan.TIME]
    assert sum(numbers) == len(check_plan.compared())
