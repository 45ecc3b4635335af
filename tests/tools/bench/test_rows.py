import csv

import pytest

from tools.bench import rows


def test_percentiles_of_known_times():
    assert rows.percentiles([float(i) for i in range(11)]) == (2.0, 5.0, 8.0)


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "a.csv"
    rows.append(path, [{"case": "O0", "ms": 1}])
    rows.append(path, [{"case": "O2", "ms": 2}, {"case": "O3", "ms": 3}])
    with path.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert found == [{"case": "O0", "ms": "1"}, {"case": "O2", "ms": "2"}, {"case": "O3", "ms": "3"}]


def test_other_columns_are_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.csv"
    rows.append(path, [{"case": "O0", "ms": 1}])
    before = path.read_text()
    with pytest.raises(ValueError, match="write to another file"):
        rows.append(path, [{"case": "O0", "seconds": 1}])
    assert path.read_text() == before


def test_a_row_says_where_it_was_taken():
    found = rows.machine("abc1234")
    assert list(found) == ["date", "commit", "gpu", "driver", "torch"]
    assert found["commit"] == "abc1234"
    assert found["gpu"]
    assert found["torch"]


def test_written_rows_replace_the_file(tmp_path):
    path = tmp_path / "new" / "a.csv"
    for value in (1, 2):
        rows.write(path, ("case", "ms"), [{"case": "O0", "ms": value}])
    assert path.read_text() == "case,ms\nO0,2\n"


def test_aligned_rows_are_as_wide_as_their_longest_cell():
    assert rows.aligned(("a", "ms"), [{"a": "O2", "ms": 1234, "more": 0}, {"a": "", "ms": 5}]) == " a    ms\nO2  1234\n       5"
