"""The fuzz run itself: it sees what it is against, its cases come again by their numbers, and some of each part pass."""

import importlib
import random
from pathlib import Path

import pytest
from attack import fuzz, fuzz_checkpoints, fuzz_files
from attack.fuzz import Watch, problems

from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home

ROOT = Path(__file__).parents[2]
SMOKE = {"files": 10, "checkpoints": 6}
SEED = 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    """A folder with the canary, and the watch over it: a hook stays for as long as the process, so there is one."""
    folder = tmp_path_factory.mktemp("fuzz").resolve()
    fuzz._canary(folder)
    for name in ("box", "tmp"):
        (folder / name).mkdir()
    return folder, Watch(folder, folder / "canary")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {part: tmp_path_factory.mktemp(part) for part in ("files", "checkpoints")}
    fuzz_files.prepare(found["files"])
    fuzz_checkpoints.prepare(found["checkpoints"], levels=("O2",))
    return found


@pytest.mark.promise("Tools", "Forged files end in a message; their code never runs (`make fuzz`).")
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
