"""Checkpoints of a run: whole or not there, of the same settings, the newest two; and the model at its end."""

import os
import random

import pytest
import torch

from helpers import kills, post_runs
from megatron.lm.post import saved

SETTINGS = {"lr": 1e-3, "data": "abc"}


def write(folder, step, value=0.0):
    saved.save(folder, step, {"x": torch.full((4,), value)}, SETTINGS, [{"step": at + 1} for at in range(step)])


def test_the_newest_is_loaded_and_two_stay(tmp_path):
    for step in (1, 2, 10):
        write(tmp_path, step, step)
    assert [path.name for path in saved.checkpoints(tmp_path)] == ["step_00000002.pt", "step_00000010.pt"]
    found = saved.load(tmp_path, SETTINGS, "cpu")
    assert (found["step"], found["content"]["x"].tolist()) == (10, [10.0] * 4)
    assert len(found["metrics"]) == 10
    assert len(post_runs.metrics(tmp_path)) == 10


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_leaves_a_whole_checkpoint(tmp_path, renames):
    write(tmp_path, 1, 1.0)

    def work():
        for step in (2, 3):
            write(tmp_path, step, float(step))

    assert kills.killed_at_a_rename(renames, work)
    found = saved.load(tmp_path, SETTINGS, "cpu")
    assert found["content"]["x"].tolist() == [float(found["step"])] * 4
    assert found["step"] == (1, 2, 2, 3)[renames]


def test_other_settings_are_refused_by_name(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=r"was written with --lr 0.001, but it is 0.1 now"):
        saved.load(tmp_path, SETTINGS | {"lr": 0.1}, "cpu")
    with pytest.raises(ValueError, match="--beta None, but it is 2 now"):
        saved.load(tmp_path, SETTINGS | {"beta": 2}, "cpu")


def test_a_damaged_one_is_named(tmp_path):
    write(tmp_path, 1)
    path = saved.checkpoints(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step_00000001.pt is damaged.*delete it"):
        saved.load(tmp_path, SETTINGS, "cpu")


def test_a_pickle_of_something_else_runs_nothing(tmp_path):
    torch.save({"settings": SETTINGS, "content": print}, tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match="is damaged"):
        saved.load(tmp_path, SETTINGS, "cpu")


def test_the_model_appears_whole_and_once(tmp_path):
    class Part:
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def save_pretrained(self, folder):
            (folder / self.name).write_text(self.name)
            if self.fails:
                raise OSError("full")

    with pytest.raises(OSError, match="full"):
        saved.save_model(tmp_path, Part("weights"), Part("words", fails=True))
    assert not (tmp_path / "model").exists()
    done = saved.save_model(tmp_path, Part("weights"), Part("words"))
    assert sorted(path.name for path in done.iterdir()) == ["weights", "words"]
    assert saved.save_model(tmp_path, Part("other"), Part("words")) == done
    assert not (done / "other").exists()
    assert not (tmp_path / "model.partial").exists()


@pytest.mark.parametrize(
    "content",
    [
        [],
        (),
        {},
        torch.ones(3),
        {"step": float("inf"), "settings": SETTINGS, "metrics": [{}], "content": {}},
        {"step": -1, "settings": SETTINGS, "metrics": [], "content": {}},
        {"step": 1, "settings": [], "metrics": [{}], "content": {}},
        {"step": 1, "settings": {3: 4}, "metrics": [{}], "content": {}},
        {"step": 1, "settings": SETTINGS, "metrics": [1], "content": {}},
        {"step": 2, "settings": SETTINGS, "metrics": [{}], "content": {}},
        {"step": 1, "settings": SETTINGS, "metrics": [{}], "content": [1]},
    ],
)
def test_odd_content_is_one_line(tmp_path, content):
    torch.save(content, tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match=r"step_00000001\.pt is damaged \(.*\): delete it, and run the same command") as refusal:
        saved.load(tmp_path, SETTINGS, "cpu")
    assert "\n" not in str(refusal.value)


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match=r"step_00000001\.pt is not a regular file"):
        saved.load(tmp_path, SETTINGS, "cpu")


def test_a_pickle_that_ends_anywhere_is_one_line(tmp_path):
    """Bytes of the pickle in the zip file are flipped, whose checksum torch does not compare."""
    write(tmp_path, 1)
    path = saved.checkpoints(tmp_path)[0]
    sound, draw = path.read_bytes(), random.Random(0)
    start = sound.index(b"data.pkl") + 8
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        data[start + draw.randrange(300)] = draw.randrange(256)
        path.write_bytes(data)
        try:
            saved.load(tmp_path, SETTINGS, "cpu")
        except ValueError as error:
            refused += "\n" not in str(error)
    assert refused > 100


def test_states_that_do_not_fit_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} is damaged \(RuntimeError: .*Missing key"), saved.restoring(tmp_path):
        torch.nn.Linear(2, 2).load_state_dict({})
    for kind in (MemoryError, OSError, KeyboardInterrupt):
        with pytest.raises(kind), saved.restoring(tmp_path):
            raise kind
