"""A release: the sdist is the checkout, its wheel runs the quick start in an empty environment, and the files beside it are true."""

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import msamp

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
SUPPORTED = sorted(
    (tuple(map(int, version.split("."))) for version in re.findall(r'"Programming Language :: Python :: (3\.\d+)"', SETUP)),
)
LOCK = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", LOCK, re.MULTILINE))
LEFT_TO_TORCH = {"torch"}  # its build depends on the machine


def test_everything_in_the_lock_has_hashes_and_is_installed_by_them():
    for requirement in re.split(r"\n(?=\S)", LOCK.strip()):
        if not requirement.startswith("#"):
            assert re.search(r" \\\n    --hash=sha256:[0-9a-f]{64}", requirement), requirement
    assert {"pip", "setuptools", "triton"} <= LOCKED.keys()
    (installed,) = re.findall(r"^\.venv/\.installed:.*\n((?:\t.*\n|ifneq.*\n)+)else", MAKEFILE, re.MULTILINE)
    assert "--no-deps --require-hashes -r $(LOCK)" in installed
    assert "--extra-index-url" not in MAKEFILE


@pytest.mark.nightly(60)
def test_the_lock_has_no_known_vulnerability_or_no_database_can_be_reached():
    said = call(["make", "audit"], ROOT)
    assert "No known vulnerabilities found" in said or "NOT AUDITED" in said


def test_the_lock_has_a_version_of_every_requirement_but_torchs_own():
    from packaging.requirements import Requirement

    extras = re.search(r"^EXTRAS = (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    scope: dict = {}
    with contextlib.chdir(ROOT):
        exec(SETUP.replace("setup(\n", "declared = dict(\n").replace("Path(__file__).parent", "Path('.')"), scope)
    declared = scope["declared"]
    wanted = [*declared["install_requires"], *(line for extra in extras for line in declared["extras_require"][extra])]
    for requirement in map(Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in LEFT_TO_TORCH:
            assert name not in LOCKED, f"{name} is locked, so that no other torch can be installed"
        else:
            assert requirement.specifier.contains(LOCKED[name]), f"{requirement} is not what requirements-dev.txt has: make lock"
    assert not [name for name in LOCKED if name.startswith(("nvidia-", "cuda-"))]


@functools.cache
def interpreter(version: tuple[int, int]) -> str | None:
    """A Python of this version: the one of this environment, on PATH, of pyenv or of uv; None if there is none."""
    name = "python{}.{}".format(*version)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"{sys.base_prefix}/bin/{name}", shutil.which(name), *map(str, pyenv.glob("{}.{}.*/bin/python".format(*version)))]
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", "{}.{}".format(*version)], capture_output=True, text=True, check=False)
        candidates.append(found.stdout.strip())
    for candidate in filter(shutil.which, filter(None, candidates)):  # pyenv's shims are on PATH for versions that they refuse to start
        line = [candidate, "-c", "import sys, venv; print(*sys.version_info[:2])"]
        if subprocess.run(line, capture_output=True, text=True, check=False).stdout.split() == list(map(str, version)):
            return candidate
    return None


def call(line: list[object], cwd: Path, environment: dict[str, str] | None = None, limit: int = 1800) -> str:
    done = subprocess.run(
        list(map(str, line)), cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel as `make dist` builds them, from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("release")
    for name in tracked():
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "checkout" / name)
    build = re.search(r"^\t\$\(PYTHON\) (-m build .*)$", MAKEFILE, re.MULTILINE)[1]
    call([sys.executable, *shlex.split(build)], folder / "checkout")
    (sdist,), (wheel,) = ((folder / "checkout/dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def tracked() -> list[str]:
    """Files of the repository as they are here, without what was deleted."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.promise("Packaging", "The sdist contains every file of the repository, and a wheel can be built from it.")
@pytest.mark.nightly(30)
def test_the_sdist_is_the_checkout_and_the_wheel_comes_from_it(release):
    sdist, wheel = release
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in names if name.startswith("msamp.egg-info/"))}
    assert names - made == set(tracked())
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {name for name in tracked() if name.startswith(("msamp/", "megatron/"))}
    assert packaged == sources


@pytest.mark.promise("Packaging", "On the oldest and the newest supported Python, the wheel alone runs the quick start.")
@pytest.mark.nightly(900)
@pytest.mark.timeout(3600)  # on a Python for which the package source has no CPU build, torch and its CUDA packages are gigabytes
@pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]], ids="{0[0]}.{0[1]}".format)
def test_the_wheel_runs_the_quick_start_in_an_empty_environment(version, release, tmp_path):
    python = interpreter(version)
    if python is None:  # a skip would pass unnoticed before a release
        name = "Python {}.{}".format(*version)
        pytest.fail(f"this machine has no {name}, on which the wheel must run: install it with pyenv or uv", pytrace=False)
    call([python, "-m", "venv", tmp_path / "venv"], tmp_path)
    kept = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy") or name.startswith(("PIP_", "SSL_"))}
    environment = kept | {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'venv/bin'}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    torch = shlex.split(re.search(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE)[1])
    call([tmp_path / "venv/bin/python", "-m", "pip", "install", "--no-cache-dir", *torch], tmp_path, environment)
    call([tmp_path / "venv/bin/python", "-m", "pip", "install", "--no-cache-dir", f"{release[1]}[plot]"], tmp_path, environment)
    home = tmp_path / "empty"
    home.mkdir()
    assert call([tmp_path / "venv/bin/msamp", "--version"], home, environment).split() == ["msamp", msamp.__version__]
    # In its short form, which ends with exit code 1: in 20 steps no model learns as much as the verdict demands.
    short = [str(tmp_path / "venv/bin/msamp"), "quickstart", "--iters", "20"]
    done = subprocess.run(short, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    *said, first, second = (home / "runs/quickstart/summary.txt").read_text().splitlines()
    assert said[0].startswith("validation loss: O0 ")
    assert all("below the unigram entropy: train longer" in line for line in (first, second))
    assert not [line for line in said if "FAILED" in line], "O2 differs from O0"
    assert (home / "runs/quickstart/report.html").is_file()
