"""What is installed: the library and the trainer with the tools of users, and it runs where nothing else of this tree is."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools import Distribution

import msamp
from megatron.lm.command import dispatch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("convert_checkpoint", "generate", "inspect_scales", "loss_compare", "prepare_text", "preprocess_data", "report")
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 60 --precision O2 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --eval-iters 0 --split 1,0,0 --num-workers 0 --data-path toy_text_document"
)


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("msamp", "megatron"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", folder, wheel)
    return folder


def pip(command: str, *arguments: object) -> None:
    line = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *map(str, arguments)]
    subprocess.run(line, check=True, timeout=300)


def run(site: Path, cwd: Path, *line: str) -> str:
    """Run a command of the installed wheel, which must end well; its stdout."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


@pytest.mark.nightly(20)
def test_the_built_wheel_holds_the_tools_of_users_and_no_benchmarks(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"megatron/lm/tools/{tool}.py" for tool in TOOLS} <= names
    assert {"msamp/py.typed", "megatron/lm/data/tokenizers/requirements-text.txt"} <= names
    assert {name.partition("/")[0] for name in names} == {"msamp", "megatron", f"msamp-{msamp.__version__}.dist-info"}
    assert not {name for name in names if name.startswith("megatron/") and not name.startswith("megatron/lm/")}


@pytest.mark.promise("Packaging", "An installed wheel prepares data, plans, trains and converts in an empty folder.")
@pytest.mark.nightly(60)
def test_an_installed_wheel_prepares_trains_and_converts_in_an_empty_folder(site, tmp_path):
    found = run(site, tmp_path, sys.executable, "-c", "import msamp, megatron.lm as lm; print(msamp.__file__, lm.__file__)")
    assert found.split() == [str(site / "msamp/__init__.py"), str(site / "megatron/lm/__init__.py")]
    msamp_command = str(site / "bin/msamp")
    command = [msamp_command, "pretrain"]
    assert "--hidden-size" in run(site, tmp_path, *command, "--help")
    (tmp_path / "toy.txt").write_text("\n<|endoftext|>\n".join(" ".join(str((7 * i + j) % 59) for j in range(40)) for i in range(30)))
    prepare = "--input toy.txt --output-prefix toy --tokenizer-type NullTokenizer --vocab-size 60 --append-eod --workers 2"
    run(site, tmp_path, *module("megatron.lm.tools.preprocess_data"), *prepare.split())
    assert "nothing was started" in run(site, tmp_path, *command, *shlex.split(MODEL), "--dry-run")
    trained = run(site, tmp_path, *command, *shlex.split(MODEL), "--log-interval", "5", "--save", "saved", "--save-interval", "10")
    assert "10" in trained
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text().strip() == "10"
    convert = "export-bf16 --load saved --output plain"
    assert "iteration 10" in run(site, tmp_path, *module("megatron.lm.tools.convert_checkpoint"), *convert.split())
    assert list((tmp_path / "plain").glob("*.safetensors"))
    for name in dispatch.COMMANDS:
        assert "usage:" in run(site, tmp_path, msamp_command, name, "--help")
