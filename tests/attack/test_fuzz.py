"""The fuzz run itself: it sees what it is against, its cases come again by their numbers, and some of each part pass."""

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack import fuzz, fuzz_checkpoints, fuzz_files, fuzz_flags
from attack.fuzz import CANARY, Command, Watch, problems

from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home

ROOT = Path(__file__).parents[2]
SMOKE = {"flags": 20, "files": 10, "checkpoints": 6}
SEED = 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    """A folder with the canary, and the watch over it: a hook stays for as long as the process, so there is one."""
    folder = tmp_path_factory.mktemp("fuzz").resolve()
    fuzz._canary(folder)
    for name in ("box", "tmp"):
        (folder / name).mkdir()
    return folder, Watch(folder, folder / "canary")


def _writes(path: str) -> Callable[[list[str]], int]:
    def main(argv: list[str]) -> int:
        Path(path).write_text("x")
        return 0

    return main


def _fails(code: int, words: str = "") -> Callable[[list[str]], int]:
    def main(argv: list[str]) -> int:
        print(words, end="", file=sys.stderr)
        return code

    return main


def _refuses_late(argv: list[str]) -> int:
    Path("o").mkdir()
    return _fails(2, "no")(argv)


def _starts(argv: list[str]) -> int:
    subprocess.run(["true"], check=False)
    return 0


def _spins(argv: list[str]) -> int:
    return sum(range(10**6)) and 0


@pytest.mark.parametrize(
    ("main", "word"),
    [
        (_writes("../../outside"), "it opened for writing '../../outside'"),
        (_writes("inside"), None),
        (lambda argv: os.makedirs("/dev", exist_ok=True), None),
        (_writes("/dev/null"), None),
        (_writes("/dev/none_of_the_fuzz_run"), "PermissionError"),
        (_starts, "it started a process"),
        (lambda argv: importlib.import_module(CANARY) and 0, "it imported the canary"),
        (lambda argv: len(Path("../canary/secret.distcp").read_bytes()) and 0, "it opened the canary '../canary/secret.distcp'"),
        (lambda argv: [][1], "IndexError"),
        (_fails(3, "x"), "it ended with 3"),
        (_fails(2), "it ended with 2 and said nothing"),
        (_fails(1, "error: this is a bug of the program"), "it says 'this is a bug'"),
        (_refuses_late, "it refused, and left behind ['o']"),
        (lambda argv: print("\udcff"), "UnicodeEncodeError"),
        (_spins, "it took 0 s"),
        (_fails(2, "error: --lr 0: give more"), None),
    ],
)
def test_what_may_not_be_is_seen(
    place: tuple[Path, Watch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Any], word: str | None
):
    folder, watch = place
    box = folder / "box" / tmp_path.name
    box.mkdir()
    monkeypatch.chdir(box)
    monkeypatch.setattr(watch, "box", str(box))
    (folder / "box" / "canary").exists() or (folder / "box" / "canary").symlink_to(folder / "canary")
    monkeypatch.setattr(watch, "canary", str(folder / "box" / "canary"))
    if main is _spins:
        monkeypatch.setattr(fuzz, "LIMIT_S", -1.0)
    found = problems(Command("it", main, []), box, watch)
    assert any(word in text for text in found) if word else not found


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {part: tmp_path_factory.mktemp(part) for part in ("files", "checkpoints")}
    fuzz_files.prepare(found["files"])
    fuzz_checkpoints.prepare(found["checkpoints"], levels=("O2",))
    return found | {"flags": found["files"]}


@pytest.mark.promise("Tools", "Invalid flags and forged files end in a message; their code never runs (`make fuzz`).")
@pytest.mark.parametrize("part", SMOKE)
def test_some_of_each_part_pass(
    part: str, place: tuple[Path, Watch], material: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first cases of a seed; the run itself takes thousands, of another seed each time."""
    monkeypatch.setattr(fuzz.tempfile, "tempdir", str(tmp_path))
    module, (_, watch) = importlib.import_module(f"attack.fuzz_{part}"), place
    monkeypatch.setattr(watch, "box", str(tmp_path))
    found = []
    with cpu_home():
        for number in range(SMOKE[part]):
            box = tmp_path / str(number)
            box.mkdir()
            monkeypatch.chdir(box)
            for command in module.case(random.Random(f"{SEED} {part} {number}"), material[part], box):
                found += [f"{number}: {command.name} {command.argv}: {text}" for text in problems(command, box, watch)]
        process_groups.shutdown()
    assert not found, "\n".join(found)


@pytest.mark.nightly(400)
@pytest.mark.timeout(1500)
def test_the_run_itself(tmp_path: Path):
    """In processes of its own."""
    counts = ["--flags", "100", "--checkpoints", "30", "--files", "30", "--seed", "2", "--jobs", "2", "--keep", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-m", "attack.fuzz", *counts], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 2\n")
    assert "seed 2: 100 flags, 30 checkpoints, 30 files; 0 failed" in done.stdout


def test_preprocess_data_starts_no_process(tmp_path: Path):
    """Each number of --workers is judged, and the last, which counts, is 0."""
    drawn = []
    for number in range(300):
        (box := tmp_path / str(number)).mkdir()
        drawn += fuzz_flags.case(random.Random(f"1 flags {number}"), box, box)
    given = [command.argv for command in drawn if command.name == "preprocess_data"]
    assert all(argv[-2:] == ["--workers", "0"] for argv in given)
    assert any(argv[argv.index("--workers") + 1] != "0" for argv in given)


def test_a_process_that_dies_is_a_case_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another goes on with the next case."""
    (tmp_path / "attack").mkdir()
    text = "import os\nfrom attack.fuzz import Command\ndef prepare(material): pass\ndef case(draw, material, box):\n"
    text += "    deadly = draw.random() < 0.5\n    return [Command('dies', lambda argv: os._exit(7) if deadly else 0, [])]\n"
    (tmp_path / "attack" / "fuzz_deaths.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    deadly = [n for n in range(6) if random.Random(f"1 deaths {n}").random() < 0.5]
    told: list[str] = []
    failures = fuzz.run_part("deaths", 1, range(6), tmp_path / "kept", told.append)
    assert [int(text.split("deaths:")[1].split()[0]) for text in failures] == deadly
    assert all("the process died" in text for text in failures)
    assert len(told) == len(failures) == len(deadly) > 1
