"""What is not reproduced says why."""

from tools.reproduce.absent import ENTRIES


def test_each_has_a_reason_and_nothing_to_run():
    assert all(entry.reason.endswith(".") and entry.run is None for entry in ENTRIES)
