"""The Dockerfile and the shell scripts under their linters; what it copies exists, and its CPU image's lines work in a new environment."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megatron.lm.command import dispatch

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions in order, continued lines joined, comments gone; before the first stage: ""."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            if word == "FROM":
                stage = rest.split(" AS ")[1]
                stages[stage] = []
            stages[stage].append((word, rest))
    return stages


STAGES = instructions()


def linter(name: str) -> str:
    found = Path(sys.executable).parent / name  # what the extra `dev` installs
    assert found.exists(), f"{name} is missing: pip install -e '.[dev]'"
    return str(found)


def test_hadolint_has_no_complaint():
    done = subprocess.run([linter("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_has_no_complaint():
    scripts = [str(path.relative_to(ROOT)) for path in sorted([*(ROOT / "examples").rglob("*.sh"), *(ROOT / "findings").glob("*.sh")])]
    assert "examples/slurm/pretrain.sh" in scripts
    command = [linter("shellcheck"), "-x", "-P", "SCRIPTDIR", "-P", ".", *scripts, ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# By other names than the stages': `gpu` would be taken for the mark of tests that need one.
each_image = pytest.mark.parametrize("stage", ["cpu", "gpu", "peers"], ids=lambda stage: f"image_{stage}")


def copied(stage: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY."""
    return [(words[:-1], words[-1]) for word, rest in STAGES[stage] if word == "COPY" for words in [rest.split()]]


@each_image
def test_what_is_copied_exists_and_is_sent(stage: str):
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    sources = [source for found, _ in copied(stage) for source in found]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, kept) for kept in sent), source
    assert set(sent) <= {source for image in STAGES for found, _ in copied(image) for source in found}


@each_image
def test_an_image_starts_something_that_is_there(stage: str):
    (start,) = (json.loads(rest) for word, rest in STAGES[stage] if word == "CMD")
    assert start[0] == "msamp"
    assert start[1] in dispatch.COMMANDS


@each_image
def test_an_image_is_installed_by_hash_from_one_source_per_name_on_a_base_with_a_digest_and_runs_without_root(stage: str):
    bases = dict(rest.split("=", 1) for word, rest in STAGES[""] if word == "ARG")
    (base,) = (rest for word, rest in STAGES[stage] if word == "FROM")
    assert re.fullmatch(r"[a-z/]+:[^@]+@sha256:[0-9a-f]{64}", bases[base.split("}")[0].removeprefix("${")])
    first, *others = (line for word, rest in STAGES[stage] if word == "RUN" for line in re.findall("pip install [^&]*", rest))
    assert "--no-deps --require-hashes" in first
    unhashed = [line for line in others if "--no-deps" not in line]
    assert '"${}_TORCH" --index-url "${}_INDEX"'.replace("{}", "CPU" if stage == "cpu" else "GPU") in unhashed[0]
    pinned = {name for line in unhashed for name in re.findall(r"([\w-]+)==", line)}
    assert pinned == ({"setuptools", "wheel", "ninja", "pybind11"} if stage == "peers" else set())
    assert ["'.[gpu,peers]'" in line for line in unhashed[1:]] == ([False, True] if stage == "peers" else [])
    assert "--extra-index-url" not in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert ("USER", "10001:10001") in STAGES[stage]


@pytest.mark.promise("Clusters", "The commands of the CPU image work in a new environment.")
@pytest.mark.nightly(900)
@pytest.mark.timeout(3600)  # packages are fetched, and the quick start alone takes minutes
def test_the_lines_of_the_cpu_image_work_in_a_new_environment(tmp_path: Path):
    """Without docker: a virtual environment instead of the base, a folder instead of /opt/msamp; then what `docker run` starts."""
    venv.create(tmp_path / "venv", with_pip=True)
    home = tmp_path / "msamp"
    home.mkdir()
    names = {name: value for word, rest in STAGES["cpu"] if word == "ARG" for name, _, value in [rest.partition("=")]}
    # The build of torch is that of this machine's package source, which may know no other.
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    names["CPU_INDEX"] = pip.stdout.strip() or "https://pypi.org/simple"
    kept = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy") or name.startswith("PIP_") or name == "HOME"}
    environment = kept | names | {"PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(command: list[str]) -> str:
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=3000, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    for word, rest in STAGES["cpu"]:
        if word == "RUN":
            run(["sh", "-c", rest])
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, home / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, home / target)
    (start,) = (json.loads(rest) for word, rest in STAGES["cpu"] if word == "CMD")
    run(start)
    assert (home / "runs" / "quickstart" / "report.html").is_file()
    assert "msamp" in run(["sh", "-c", "ls ../venv/bin"])
