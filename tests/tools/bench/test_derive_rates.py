"""The planner's rates are what the rows give, and a row that is missing is said."""

import pytest

from tools.bench import derive_rates


def test_the_file_is_what_the_rows_give(capsys):
    assert derive_rates.main(["--check"]) == 0, capsys.readouterr().out


def test_another_file_is_stale_and_written(tmp_path, capsys):
    file = tmp_path / derive_rates.FILE
    file.parent.mkdir(parents=True)
    file.write_text("gpu\n")
    assert derive_rates.main(["--check"], tmp_path) == 1
    assert file.read_text() == "gpu\n"
    assert derive_rates.main([], tmp_path) == 0
    assert file.read_text() == derive_rates.text()
    assert derive_rates.main(["--check"], tmp_path) == 0


def test_a_row_that_is_not_there_is_said():
    with pytest.raises(ValueError, match="0000000"):
        derive_rates.step(derive_rates.STEP, "0000000", "O3")
