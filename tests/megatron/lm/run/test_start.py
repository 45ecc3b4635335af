"""How a run starts: what a used folder means, and that the same command starts a job and starts it again."""

from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.checkpoints import of, published, seal
from megatron.lm.checkpoint import latest
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.config import CheckpointConfig
from megatron.lm.run.start import with_checkpoint
from megatron.lm.training.run_record import Run


def start(**settings: Any) -> tuple[CheckpointConfig, str | None]:
    """What a start with these settings comes to."""
    return with_checkpoint(tiny.config("corpus", **{key: str(x) if isinstance(x, Path) else x for key, x in settings.items()}).checkpoint)


def child(parent: dict[str, Any], finetune: bool = False) -> dict[str, Any]:
    return of(Run().child_of(parent, finetune))


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """A folder that holds a run."""
    return published(tmp_path / "a", 4, **of(Run())).parent


@pytest.mark.promise("Checkpoints", "A `--save` folder with another run is refused, with the alternatives.")
def test_a_used_folder_is_not_begun_anew(a: Path, tmp_path: Path):
    ways = f"--load {a} --save {a} to resume it, another --save to keep both, or move it away"
    with pytest.raises(ValueError, match=f"{a} contains another run .*: use {ways}"):
        start(save=a)
    with pytest.raises(ValueError, match="contains another run"):
        start(save=a, load=a, finetune=True)
    other = published(tmp_path / "b", 2, **of(Run())).parent
    with pytest.raises(ValueError, match="contains another run"):
        start(save=a, load=other, finetune=True)
    with pytest.raises(ValueError, match="contains another run"):
        start(save=a, load=other)


@pytest.mark.promise("Checkpoints", "A first start that saved nothing can be repeated.")
@pytest.mark.parametrize("left", ["nothing", "a folder", "what a kill left"])
def test_a_first_start_that_came_to_nothing_is_repeated(tmp_path: Path, left: str):
    folder = tmp_path / "run"
    if left != "nothing":
        folder.mkdir()
    if left == "what a kill left":
        (folder / "iter_0000002.partial").mkdir()
        (folder / ".lock").touch()
    for settings in ({"save": folder}, {"save": folder, "load": folder}):
        found, line = start(**settings)
        assert found.load is None
        assert line == (
            f"warning: --load {folder} holds no checkpoint, and is the folder of --save: training starts from scratch"
            if "load" in settings
            else None
        )


@pytest.mark.promise("Checkpoints", "`--ckpt-step` never starts from scratch.")
def test_a_named_iteration_of_a_first_start_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--ckpt-step 5: --load .*run holds no checkpoint; choose its folder, or drop --ckpt-step"):
        start(save=tmp_path / "run", load=tmp_path / "run", ckpt_step=5)


@pytest.mark.promise("Checkpoints", "`--load A --save B`, restarted, resumes from B.")
@pytest.mark.parametrize("finetune", [False, True], ids=["whole", "finetune"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_the_child_of_another_folder_goes_on_when_it_is_started_again(tmp_path: Path, finetune: bool, named: bool):
    a = published(tmp_path / "a", 4, **(of(Run()) if named else {})).parent
    b, flags = tmp_path / "b", {"load": a, "save": tmp_path / "b", "finetune": finetune, "no_load_optim": True}
    assert start(**flags)[0].load == str(a)
    published(b, 2, **child(read_info(latest(a)), finetune))
    found, line = start(**flags)
    assert (found.load, found.finetune, found.no_load_optim) == (str(b), False, False)
    assert line == f"--save {b} contains this run, which started from --load {a}: it resumes there"
    assert start(**flags, ckpt_step=4)[0].load == str(b)
    for other in ({"finetune": not finetune}, {"ckpt_step": 3}):
        with pytest.raises(ValueError, match="contains another run"):
            start(**(flags | other))


@pytest.mark.promise("Checkpoints", "Every checkpoint contains the identity of its run and of the run that it started from.")
def test_identities_in_whole_runs(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Resumed, adopted, begun from elsewhere, and started again: each checkpoint says whose it is."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    def run(iterations: int, **settings: Any) -> dict[str, Any]:
        """`checkpoint.json` of what a run leaves in `--save`."""
        tiny.run(tiny.config(prefix, train_iters=iterations, lr_warmup_iters=0, **settings))
        return read_info(latest(Path(settings["save"])))

    first, second = run(1, save=a), run(2, save=a, load=a)
    assert first["run"] == second["run"]
    assert first["run"]["parent"] is None
    with pytest.raises(ValueError, match=f"{a} contains another run"):
        run(2, save=a, seed=5)
    begun = run(3, load=a, save=b)
    assert begun["run"]["parent"] == {"run": first["run"]["id"], "iteration": 2, "finetune": False}
    again = run(4, load=a, save=b)
    assert again["run"] == begun["run"]
    assert f"resumed from {b} at iteration 3" in capsys.readouterr().out

    for iteration in (1, 2):  # as a version without identities left them
        folder = Path(a) / f"iter_{iteration:07d}"
        seal(folder, {key: value for key, value in read_info(folder).items() if key != "run"})
    third = run(3, save=a, load=a)
    assert third["run"]["adopted"] is True
    assert third["run"]["id"] not in (first["run"]["id"], begun["run"]["id"])
    assert run(4, save=a, load=a)["run"] == third["run"]
