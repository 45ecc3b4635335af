"""What conftest.py does with a report."""

import pytest
from conftest import pytest_report_teststatus


@pytest.mark.parametrize(("when", "outcome", "told"), [
    ("call", "failed", ("failed", "F tests/a.py::b\n", "FAILED")),
    ("setup", "failed", ("error", "E tests/a.py::b\n", "ERROR")),
    ("teardown", "failed", ("error", "E tests/a.py::b\n", "ERROR")),
    ("call", "passed", None),
    ("call", "skipped", None),
])  # fmt: skip
def test_a_failure_is_named_at_once(when, outcome, told):
    report = pytest.TestReport("tests/a.py::b", ("tests/a.py", 1, "b"), {}, outcome, None, when)
    assert pytest_report_teststatus(report) == told
