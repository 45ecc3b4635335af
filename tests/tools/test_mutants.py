"""The mutant tool, on a small project of its own. `make mutants` checks the list against this tree."""

import subprocess
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import BROKEN, KILLED, SURVIVED, Mutant, main

ENTRY = '[[mutant]]\nkind = "sums"\nfault = "{}"\nunder = "pkg"\nold = "{}"\nnew = "{}"\ntests = ["test_add.py"]\n'
MINUS, UNSEEN, NO_PYTHON = ("minus", "a + b", "a - b"), ("unseen", "a * b", "a + b"), ("no Python", "a * b", "a *")


pytestmark = pytest.mark.nightly(60)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two functions, of which one is tested."""
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "pkg" / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef times(a, b):\n    return a * b\n")
    (root / "tests" / "test_add.py").write_text("from pkg.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    (root / "untracked.py").write_text("")
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "LIST", tmp_path / "list.toml")
    return root


def listed(project: Path, *entries: tuple[str, str, str]) -> None:
    (project.parent / "list.toml").write_text("\n".join(ENTRY.format(*entry) for entry in entries))


def test_killed_survived_and_no_mutant_at_all(project, capsys):
    listed(project, MINUS, UNSEEN, NO_PYTHON)
    sound = (project / "pkg" / "sums.py").read_text()
    assert main(["--jobs", "2"]) == 2
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines if line.startswith((KILLED, SURVIVED, BROKEN))] == [KILLED, SURVIVED, "could"]
    assert "sums: minus  [tests/test_add.py::test_add]" in lines[0]
    assert "sums: unseen  [pkg/sums.py, tests/test_add.py]" in lines[1]
    assert last.startswith(f"1 {KILLED}, 1 {SURVIVED}, 1 {BROKEN}, in ")
    assert (project / "pkg" / "sums.py").read_text() == sound


@pytest.mark.parametrize(("chosen", "code"), [(["-k", "UNSEEN"], 1), (["--shard", "1/2"], 0)])
def test_one_that_survives_fails_the_run(project, chosen, code):
    listed(project, MINUS, UNSEEN)
    assert main(chosen) == code


def test_tests_that_fail_by_themselves_kill_nothing(project, capsys):
    listed(project, UNSEEN)
    (project / "tests" / "test_add.py").write_text("def test_add():\n    assert False\n")
    assert main([]) == 2
    assert "the tests do not pass without a mutant" in capsys.readouterr().err


def test_a_mutant_that_runs_for_ever_is_killed(project, tmp_path):
    mutant = Mutant("sums", "for ever", "pkg", "return a + b", "return [0 for _ in iter(int, 1)]", ("test_add.py",))
    mutants.copy_tree(project, tmp_path / "copy")
    assert not (tmp_path / "copy" / "untracked.py").exists()
    outcome = mutants.try_out(mutant, tmp_path / "copy", 3.0)
    assert (outcome.result, outcome.detail) == (KILLED, "no end within 3 s")
    assert "a + b" in (tmp_path / "copy" / "pkg" / "sums.py").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "a / b"}, "'a / b' must occur once below pkg, and occurs nowhere"),
        ({"old": "return"}, "'return' must occur once below pkg, and occurs 2 times in pkg/sums.py"),
        ({"old": "b\n"}, "two different pieces of one line"),
        ({"new": "a + b"}, "two different pieces of one line"),
        ({"tests": ("test_sub.py",)}, "'test_sub.py', which must be the end of the path of one test file, but matches none"),
        ({"tests": ("test_add.py::test_sub",)}, "tests/test_add.py has no function test_sub"),
        ({"tests": ()}, "it names no tests"),
    ],
)
def test_what_is_no_mutant_is_named(project, change, message):
    mutant = Mutant(
        **({"kind": "sums", "fault": "minus", "under": "pkg", "old": "a + b", "new": "a - b", "tests": ("test_add.py",)} | change)
    )
    with pytest.raises(ValueError, match="sums: minus: ") as caught:
        mutants.check([mutant])
    assert message in str(caught.value)


def test_bad_input_is_refused(project, capsys):
    listed(project, MINUS)
    assert main(["-k", "product"]) == 2
    assert "no mutant has 'product'" in capsys.readouterr().err
    for arguments, message in ((["--jobs", "0"], "argument --jobs: 0 is out of range"), (["--shard", "3/2"], "'3/2' is not a valid part")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    assert main(["--timeout", "nan"]) == 2
    assert "--timeout nan: give seconds above 0" in capsys.readouterr().err
    (project.parent / "list.toml").write_text('[[mutant]]\nfault = "minus"\n')
    assert main([]) == 2
    assert "mutant 'minus' has the keys ['fault'], expected" in capsys.readouterr().err
