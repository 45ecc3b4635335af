"""The planner's rates are what the rows give, and a row that is missing is said."""

import pytest

from megatron.lm.planning.rates import rates_of
from tools.bench import derive_rates


def test_the_file_is_what_the_rows_give(capsys):
    assert derive_rates.main(["--check"]) == 0, capsys.readouterr().out


def test_rates_by_hand():
    """6 x 1,207,959,552 weights x 8,192 tokens in 42.14 ms, and 5.24 ms of update for 13.255 bytes of 1,315.8M parameters."""
    rates = rates_of("h200")
    assert rates("fp8 gemm", 2048) == pytest.approx(6 * 24 * 12 * 2048**2 * 8192 / 42.14e-3, rel=1e-4)
    assert rates("update") == pytest.approx(13.255 * 1315.8e6 / 5.245e-3, rel=1e-3)
    assert rates("norm") == pytest.approx(4.48e-3 / (49 * 8192 * 2048), rel=1e-4)


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
    with pytest.raises(ValueError, match=r"step\.csv has no row with .*'commit': '0000000'.*cannot be derived"):
        derive_rates.step(derive_rates.STEP, "0000000", "O3")


def test_every_fitted_row_is_there():
    for file, commit, case, micro_batch in derive_rates.FITTED:
        assert derive_rates.one(file, commit=commit, case=case, micro_batch=micro_batch)
