"""The page of promises, from a small tree of tests."""

import pytest

from tools.docs import promises

TEST = "import pytest\n\n\n@pytest.mark.promise({})\n@pytest.mark.nightly\ndef test_{}():\n    pass\n"


def write(root, name: str, *markers: str) -> None:
    file = root / "tests" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(TEST.format(marker, number) for number, marker in enumerate(markers)))


def test_promises_are_listed_by_section_with_their_tests(tmp_path):
    write(tmp_path, "b/test_b.py", '"Data", "It is read."', '"Checkpoints", "It is saved."')
    write(tmp_path, "test_a.py", '"Data", "It is kept."')
    lines = [line for line in promises.page(tmp_path).splitlines() if line.startswith(("## ", "- "))]
    assert lines == [
        "## Checkpoints",
        "- It is saved. `tests/b/test_b.py::test_1`",
        "## Data",
        "- It is read. `tests/b/test_b.py::test_0`",
        "- It is kept. `tests/test_a.py::test_0`",
    ]


@pytest.mark.parametrize("marker", ['"Data"', '"Data", TEXT', '"Data", "One.", "Two."'])
def test_a_marker_of_another_form_is_refused_with_its_line(tmp_path, marker):
    write(tmp_path, "test_a.py", marker)
    with pytest.raises(ValueError, match=r"tests/test_a\.py:4: promise takes a section and a sentence"):
        promises.page(tmp_path)


def test_one_sentence_on_two_tests_is_refused(tmp_path):
    write(tmp_path, "test_a.py", '"Data", "It is read."', '"Data", "It is read."')
    with pytest.raises(ValueError, match="and so does another test"):
        promises.promises(tmp_path)
