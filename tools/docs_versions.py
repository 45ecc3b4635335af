"""Build the documentation of this tree, `latest`, and of tags, with links between them in the sidebar.

    make docs-versions VERSIONS="v0.1.0 v0.2.0"      or: python tools/docs_versions.py v0.1.0 v0.2.0

Each version is a folder of docs/_build/versions, built from a checkout of its tag with that tag's own configuration; a tag from before
this file builds without links. `index.html` there leads to `latest`. Any web server can serve the folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.lm.errors import RunStopped
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, path

ROOT = Path(__file__).resolve().parents[1]
LATEST = "latest"
REDIRECT = (
    f'<!doctype html>\n<meta charset="utf-8">\n<title>msamp</title>\n<meta http-equiv="refresh" content="0; url={LATEST}/index.html">\n'
)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = Parser(description=__doc__)
    parser.add_argument("tags", nargs="*", help="tags to build besides this tree")
    parser.add_argument("--out", type=path, default=ROOT / "docs/_build/versions", help="folder to write into (default: %(default)s)")
    args = parser.parse_args(argv)
    check_tags(args.tags, tags(ROOT))
    versions = [LATEST, *args.tags]
    with tempfile.TemporaryDirectory() as folder:
        build(ROOT, args.out / LATEST, LATEST, versions)
        for tag in args.tags:
            tree = Path(folder) / tag
            run(["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(tree), tag])
            try:
                build(tree, args.out / tag, tag, versions)
            finally:
                run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)])
    (args.out / "index.html").write_text(REDIRECT, encoding="utf-8")
    print(f"documentation of {', '.join(versions)}: {args.out / 'index.html'}")


def tags(root: Path) -> list[str]:
    """Return the tags of a repository."""
    return subprocess.run(["git", "-C", str(root), "tag"], capture_output=True, text=True, check=True).stdout.split()


def check_tags(chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ValueError if one of the chosen tags does not exist, is given twice, or is the name of this tree's version."""
    for tag in chosen:
        if tag not in known:
            raise ValueError(f"{tag} is not a tag: give some of {', '.join(known) or 'none, since this repository has no tag yet'}")
        if tag == LATEST or chosen.count(tag) > 1:
            raise ValueError(f"{tag} would be built twice: give each tag once, and none named {LATEST}")


def build(tree: Path, out: Path, version: str, versions: Sequence[str]) -> None:
    """Build the documentation of a checkout into `out`, which is replaced.

    Raises:
        RunStopped: Sphinx failed.
    """
    shutil.rmtree(out, ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(tree), "MSAMP_DOCS_VERSIONS": " ".join(versions), "MSAMP_DOCS_VERSION": version}
    with tempfile.TemporaryDirectory() as doctrees:
        run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", doctrees, str(tree / "docs"), str(out)], environment)


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Run a command; raise RunStopped with its exit code if it fails."""
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise RunStopped(f"exit code {code} from: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
