"""The documentation of several versions: which tags are refused, and what is built from where."""

import subprocess
from pathlib import Path

import pytest

from megatron.lm.errors import RunStopped
from tools import docs_versions


@pytest.mark.parametrize(
    ("chosen", "known", "message"),
    [
        (["v9"], ["v1", "v2"], "v9 is not a tag: give some of v1, v2"),
        (["v9"], [], "none, since this repository has no tag yet"),
        (["v1", "v1"], ["v1"], "v1 would be built twice"),
        (["latest"], ["latest"], "latest would be built twice"),
    ],
)
def test_other_tags_are_refused(chosen: list[str], known: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        docs_versions.check_tags(chosen, known)


def test_each_tag_is_built_from_its_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, built = tmp_path / "repository", []
    for line in ("init -q .", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m one", "tag v1"):
        root.mkdir(exist_ok=True)
        subprocess.run(["git", "-C", str(root), *line.split()], check=True)

    def build(tree: Path, out: Path, version: str, versions: list[str]) -> None:
        assert (tree / ".git").exists()
        out.mkdir(parents=True)
        built.append((tree == root, out.name, version, versions))

    monkeypatch.setattr(docs_versions, "ROOT", root)
    monkeypatch.setattr(docs_versions, "build", build)
    assert docs_versions.main(["v1", "--out", str(tmp_path / "out")]) == 0
    assert built == [(True, "latest", "latest", ["latest", "v1"]), (False, "v1", "v1", ["latest", "v1"])]
    assert "url=latest/index.html" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    listed = subprocess.run(["git", "-C", str(root), "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert listed.count("\n") == 1  # the checkout of the tag is gone
    assert "documentation of latest, v1" in capsys.readouterr().out


def test_a_failed_command_stops_with_its_code() -> None:
    with pytest.raises(RunStopped, match="exit code 1 from: false"):
        docs_versions.run(["false"])
