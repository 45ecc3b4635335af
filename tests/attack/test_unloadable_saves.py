"""Bits that flip in memory before a save: what the save says of itself is what the next load finds, and `--keep-last` loses nothing."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import checkpoints, tiny
from megatron.lm.checkpoint import Saver, content, latest
from megatron.lm.checkpoint.files.folder import iteration_folder
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.run.trainer import Trainer

SMALL = {"num_layers": 1}
FC1 = "decoder.layers.0.mlp.linear_fc1"
STEPS = 4


class Pair(NamedTuple):
    """A run that has trained and saves, and another that tries to load what it saved."""

    writes: Trainer
    reads: Trainer


@pytest.fixture(scope="module")
def pairs(prefix: Path) -> Iterator[Callable[[str], Pair]]:
    """A pair for each level."""
    made: dict[str, Pair] = {}

    def of(level: str) -> Pair:
        if level not in made:
            writes = Trainer(tiny.config(prefix, precision=level, train_iters=STEPS, **SMALL))
            writes.run()
            made[level] = Pair(writes, Trainer(tiny.config(prefix, precision=level, train_iters=STEPS + 2, lr_decay_iters=STEPS, **SMALL)))
        return made[level]

    with tiny.started(tiny.config(prefix, train_iters=STEPS, **SMALL)):
        yield of


def held(pair: Pair) -> list[Item]:
    """What a save would write, without the copies that states of random generators are."""
    return [item for item in content.items(pair.writes.training) if item.tensor.numel() and not item.key.startswith("rng/")]


FAULTS: dict[str, tuple[str, float, str]] = {  # key, value, message
    "a moment that is NaN": (f"exp_avg/{FC1}.bias", math.nan, "NaN"),
    "a negative mean of squares": (f"exp_avg_sq/{FC1}.bias", -1.0, "negative"),
    **{
        f"scale_inv {value:g} of a moment": (f"exp_avg/{FC1}.weight.scale_inv@0,0", value, f"has scale_inv {value:g}, which is not a power")
        for value in (0.0, math.inf, -1.0, 0.75)
    },
    "a huge moment": (f"exp_avg/{FC1}.weight.scale_inv@0,0", 2.0**100, "has the value .*; no run can use values above"),
    "a huge bias": (f"master/{FC1}.bias", 1e38, r"has the value 1e\+38; no run can use values above"),
}


@pytest.mark.promise("Checkpoints", "A save with an invalid weight, state or scale is unhealthy, names the tensor, and deletes nothing.")
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in background"])
def test_an_impossible_value_is_named_and_deletes_nothing(
    pairs: Callable[[str], Pair], tmp_path: Path, background: bool, capsys: pytest.CaptureFixture[str]
):
    training, root = pairs("O3").writes.training, tmp_path / "run"
    items = {item.key: item.tensor for item in held(pairs("O3"))}
    ended, training.config = training.config, checkpoints.pointed(training.config, save=str(root), keep_last=1, async_save=background)
    try:
        with Saver(training) as saver:
            assert saver.save()
            checkpoints.move(training, STEPS + 1)
            for name, (key, value, words) in FAULTS.items():
                before = items[key].clone()
                items[key].view(-1)[0] = value
                healthy = saver.save()
                saver.finish()
                items[key].copy_(before)
                said = capsys.readouterr().out
                assert not healthy, name
                assert re.search(f"^saved .*, which is unhealthy: .*{words}", said, re.MULTILINE), said
                assert latest(root) == iteration_folder(root, STEPS), name
            checkpoints.move(training, STEPS + 2)
            assert saver.save()
        assert latest(root) == iteration_folder(root, STEPS + 2)
    finally:
        training.config = ended
        checkpoints.move(training, STEPS)
