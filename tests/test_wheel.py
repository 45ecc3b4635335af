"""What the wheel contains; tests/test_release.py builds and runs it."""

import contextlib
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def declared() -> Distribution:
    """What setup.py says."""
    from distutils.core import run_setup  # setuptools' own where Python has none

    with contextlib.chdir(ROOT):
        return run_setup("setup.py", stop_after="init")


@pytest.mark.promise("Packaging", "The wheel contains every module of `msamp` and `megatron.lm`, and nothing else.")
def test_every_module_of_the_library_and_the_trainer_is_in_it_and_nothing_else(declared):
    folders = {path.parent for top in ("msamp", "megatron") for path in (ROOT / top).rglob("*.py")}
    assert set(declared.packages) == {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}


def test_files_that_are_no_modules_are_in_it(declared):
    others = {path for top in ("msamp", "megatron") for path in (ROOT / top).rglob("*.*") if path.suffix not in (".py", ".pyc")}
    given = {ROOT / package.replace(".", "/") / name for package, names in declared.package_data.items() for name in names}
    assert given == others
