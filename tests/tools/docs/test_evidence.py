"""Rows that may be published: their commits are in the history, or the rows say that they are not."""

import subprocess

import pytest

from tools.docs.evidence import History, unproven

KNOWN = "0123456789abcdef0123456789abcdef01234567"
WHOLE, SHALLOW = History(frozenset([KNOWN]), True), History(frozenset(), False)


@pytest.mark.parametrize("commit", ["0123456", "0123456+", "fffffff+", "fffffff?"])
def test_a_known_commit_and_a_marked_row_are_published(commit):
    assert unproven([commit], "step.csv", WHOLE) == []


@pytest.mark.parametrize("commit", ["fffffff", "unknown", "0"])
def test_an_unknown_commit_is_refused_by_name(commit):
    with pytest.raises(ValueError, match=commit):
        unproven([commit], "step.csv", WHOLE)


def test_a_row_without_a_commit_is_refused_in_any_clone():
    for history in (WHOLE, SHALLOW):
        with pytest.raises(ValueError, match="step"):
            unproven([""], "step.csv", history)


def test_a_shallow_clone_says_what_it_could_not_check():
    assert unproven(["0123456", "fffffff"], "step.csv", SHALLOW) == ["step.csv: 0123456", "step.csv: fffffff"]


def test_whole_shallow_and_absent_histories_are_told_apart(tmp_path):
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert not History.of(tmp_path / "nowhere").whole
    git("init", "-q", "full")
    for name in "ab":
        git("-C", "full", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", name)
    first, last = (git("-C", "full", "rev-parse", name) for name in ("HEAD~1", "HEAD"))
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}/full", "shallow")
    full, shallow = History.of(tmp_path / "full"), History.of(tmp_path / "shallow")
    assert full.whole
    assert full.knows(first[:7])
    assert not shallow.whole
    assert (shallow.knows(first[:7]), shallow.knows(last[:7])) == (False, True)
