"""Saving: kills, full disks, other jobs, and the background; the last whole checkpoint is never lost."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, tiny
from helpers.checkpoints import MARKER, contents, pointed, tensors
from helpers.kills import FULL, Killed, dying, failing
from megatron.lm.checkpoint import Saver, latest, load, save, saving
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.folder import check_files, read_info, tidy
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.run.trainer import Trainer
from megatron.lm.training.state import Training
from msamp.numerics.tensor import ScalingTensor


@pytest.fixture(scope="module")
def trainer(prefix: Path) -> Iterator[Trainer]:
    """One for all tests of this file, after 4 steps at O3; saving changes nothing about it."""
    with tiny.trainer(tiny.config(prefix, opt_level="O3", train_iters=4, lr_decay_iters=4)) as made:
        made.run()
        yield made


@pytest.fixture
def made(trainer: Trainer, tmp_path: Path) -> Iterator[Trainer]:
    """The trainer, said to be at iteration 6, that is to save into `tmp_path`/save."""
    training = trainer.training
    training.iteration, training.consumed_samples, training.config = 6, 24, pointed(trainer.config, save=str(tmp_path / "save"))
    yield trainer
    training.iteration, training.consumed_samples, training.config = 4, 16, trainer.config


@pytest.fixture(scope="module")
def good(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trainer's checkpoint of iteration 4; copy it before changing anything."""
    return save(trainer.training, tmp_path_factory.mktemp("good")).parent


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, less than four checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs more rights")
    yield place
    subprocess.run(["umount", place], check=True)


def in_background(training: Training) -> None:
    training.config = pointed(training.config, async_save=True)


# What is written


def test_a_checkpoint_tells_what_it_is_and_keeps_each_format_s_bytes(good: Path):
    info = read_info(latest(good))
    assert (info["iteration"], info["consumed_samples"], info["schedule_steps"], info["vocab_size"]) == (4, 16, 4, 60)
    assert info["torch"] == torch.__version__
    assert info["config"]["precision"]["opt_level"] == "O3"
    assert set(info["files"]) == {"__0_0.bin", "plan.json"}
    held = tensors(latest(good))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    formats = {state: held[f"{state}/{name}"].dtype for state in ("model", "master", "exp_avg", "exp_avg_sq")}
    fp8, fp16 = torch.float8_e4m3fn, torch.float16
    assert formats == {"model": fp8, "master": fp16, "exp_avg": fp8, "exp_avg_sq": fp16}
    assert all(held[f"{state}/{name}.scale_inv@0,0"].dtype == torch.float32 for state in formats)
    assert {key.partition("/")[0] for key in held} == {*formats, "step", "rng"}


# Kills


@pytest.mark.parametrize("iteration", [4, 6], ids=["over-itself", "the-next"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    made: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
):
    """All calls that change the disk, torch's own among them, are the last one once. A checkpoint here is a few numbers."""
    value, seen = 0.0, []
    monkeypatch.setattr(saving.content, "items", lambda training: [Item.whole(f"w{i}", torch.full((5,), value)) for i in range(3)])

    def publish(root: Path, iteration: int, number: float, keep: int | None = None) -> None:
        nonlocal value
        value = number
        checkpoints.move(made.training, iteration)
        save(made.training, root, keep)

    for after in range(100):
        root = tmp_path / str(after)
        publish(root, 4, 4.0)
        with monkeypatch.context() as patch, suppress(Killed):
            calls = dying(patch, after)
            publish(root, iteration, 5.0, keep=1)
        folder = latest(root)
        check_files(folder, read_info(folder)["files"])
        held = {float(number) for x in tensors(folder).values() for number in x}
        assert held in ({4.0}, {5.0}), (after, calls)
        seen += held
        tidy(root)  # and the next start clears what the kill left
        publish(root, 8, 8.0, keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["iter_0000008", MARKER], (after, calls)
        if len(calls) < after:
            break
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (4.0, 5.0)
    assert len(calls) > 15


# Disks


@pytest.mark.parametrize("error", [FULL, RuntimeError("PytorchStreamWriter failed writing file"), PermissionError(13, "Permission denied")])
@pytest.mark.parametrize("where", ["data", "checkpoint.json", "publishing"])
def test_a_failing_disk_leaves_the_last_checkpoint(
    made: Trainer, copy: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
):
    before = contents(copy)
    module, name = {"data": (storage, "write"), "checkpoint.json": (saving, "write_info"), "publishing": (saving, "publish")}[where]
    monkeypatch.setattr(module, name, failing(error))
    with pytest.raises(ValueError, match=rf"cannot save to .*iter_0000006: .*{error.args[-1]}; free space or choose another --save"):
        save(made.training, copy)
    assert contents(copy) == before


# One run's saver


def test_the_saver_holds_its_folder_until_it_is_left(made: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = []

    @contextmanager
    def watched(root: Path) -> Iterator[None]:
        held.append(root)
        yield
        held.remove(root)

    monkeypatch.setattr(saving, "locked", watched)
    with Saver(made.training):
        assert held == [tmp_path / "save"]
    assert not held


def spoil(training: Training) -> None:
    """Change everything that a step changes, where it stands."""
    held: list[Any] = [*training.model.parameters(), *training.model.buffers()]
    held += [value for state in training.optimizer.state.values() for value in state.values()]
    with torch.no_grad():
        for x in held:
            for part in (x.payload, x.scale_inv) if isinstance(x, ScalingTensor) else (x,):
                part.view(torch.uint8 if part.dim() else part.dtype).fill_(1)
    torch.manual_seed(99)
    training.iteration += 1


def test_the_background_writes_what_was_when_save_was_called(made: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, may_write = storage.write, threading.Event()

    def patient(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    save(made.training, tmp_path / "sync")
    before = checkpoints.everything(made)
    made.training.config = pointed(made.config, save=str(tmp_path / "async"), async_save=True)
    monkeypatch.setattr(storage, "write", patient)
    with Saver(made.training) as saver:
        saver.save()
        spoil(made.training)
        assert not (tmp_path / "async" / MARKER).exists()  # save has come back, and nothing is published
        may_write.set()
        saver.save()  # waits for the first, then takes the same host memory for another state
    later = tensors(tmp_path / "async" / "iter_0000007")
    sync, background = tmp_path / "sync" / "iter_0000006", tmp_path / "async" / "iter_0000006"
    assert (sync / "__0_0.bin").read_bytes() == (background / "__0_0.bin").read_bytes()
    assert checkpoints.same(tensors(sync), tensors(background))
    own = {"written", "seal", "files", "config"}  # the time, what follows from it, DCP's own name of each save
    told = [{key: value for key, value in read_info(folder).items() if key not in own} for folder in (sync, background)]
    assert told[0] == told[1]
    assert later.keys() == tensors(sync).keys()
    assert not any(torch.equal(x, later[key]) for key, x in tensors(sync).items() if key.startswith("model/decoder.layers.0.mlp"))
    longer = replace(made.config, training=replace(made.config.training, train_iters=6))
    made.training.config = pointed(longer, load=str(tmp_path / "async"), ckpt_step=6)
    load(made.training)
    assert tiny.same(before, checkpoints.everything(made))


def test_a_failure_in_the_background_is_said_at_once_and_raised_at_the_next_save(
    made: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    in_background(made.training)
    with Saver(made.training) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write", failing(FULL))
            saver.save()
            assert saver._thread is not None
            saver._thread.join()
        assert "background save failed: cannot save to" in capsys.readouterr().out
        with pytest.raises(ValueError, match=r"cannot save to .*No space left on device; free space or choose another --save"):
            saver.save()
        saver.save()  # told once; the disk is free again
    assert latest(tmp_path / "save").name == "iter_0000006"
    assert [path.name for path in (tmp_path / "save").iterdir() if ".partial" in path.name] == []
