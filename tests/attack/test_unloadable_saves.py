"""Bits that flip in memory before a save: what the save says of itself is what the next load finds, and `--keep-last` loses nothing."""

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from helpers import checkpoints, tiny
from megatron.lm.checkpoint import Saver, content, latest, load, rng, save
from megatron.lm.checkpoint.files.folder import iteration_folder, read_info
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.run.trainer import Trainer
from megatron.lm.training import health

SMALL = {"num_layers": 1}
FC1 = "decoder.layers.0.mlp.linear_fc1"
LEVELS = ("O3", "coat", "collage-fp8", "bf16", "O2", "fp16-amp", "fp32")
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


def verdicts(pair: Pair, root: Path) -> tuple[str | None, str | None]:
    """Why the save calls itself unhealthy, and why a load refuses it; None if it does not."""
    folder = save(pair.writes.training, root)
    settings = pair.reads.training.config.checkpoint
    pointed = replace(settings, load=str(root), ckpt_step=pair.writes.training.iteration, load_unhealthy=True)
    pair.reads.training.config = replace(pair.reads.training.config, checkpoint=pointed)
    try:
        load(pair.reads.training)
    except ValueError as problem:
        return health.problem_of(read_info(folder)), str(problem)
    return health.problem_of(read_info(folder)), None


def bits(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which share its memory."""
    return x.detach().view(-1).view(torch.uint8)


def held(pair: Pair) -> list[Item]:
    """What a save would write, without the copies that states of random generators are."""
    return [item for item in content.items(pair.writes.training) if item.tensor.numel() and not item.key.startswith("rng/")]


@pytest.mark.parametrize(
    ("level", "flips"),
    [("O3", 6), ("coat", 6), *(pytest.param(level, 100, marks=pytest.mark.nightly(20)) for level in LEVELS)],
)
def test_a_flipped_bit_is_judged_alike_by_the_save_and_the_load(pairs: Callable[[str], Pair], tmp_path: Path, level: str, flips: int):
    pair, draw, unhealthy = pairs(level), random.Random(level), 0
    by_kind: dict[str, list[Item]] = {}
    for item in held(pair):
        by_kind.setdefault(re.sub(r"\.layers\.\d+|@.*", "", item.key), []).append(item)
    assert verdicts(pair, tmp_path) == (None, None)
    for _ in range(flips):
        kind = draw.choice(sorted(by_kind))
        item = draw.choice(by_kind[kind])
        memory = bits(item.tensor)
        # The highest bit is the sign, the next ones are the exponent's.
        byte, mask = draw.randrange(0, len(memory), item.tensor.itemsize) + item.tensor.itemsize - 1, 128 >> draw.choice((0, 1, 1, 2))
        memory[byte] ^= mask
        said, refused = verdicts(pair, tmp_path)
        memory[byte] ^= mask
        assert (said is None) == (refused is None), (kind, mask, said, refused)
        if said is not None and refused is not None:
            unhealthy += 1
            assert any(part in refused for part in said.split("; ")), (kind, mask, said, refused)
    assert unhealthy > flips / 4
    assert verdicts(pair, tmp_path) == (None, None)


FAULTS: dict[str, tuple[str, float, str]] = {  # key, value, message
    "half a step": (f"step/{FC1}.weight", 2.5, r"is 2\.5; it must be one torch\.float32 in \[0, 5\] without a fraction"),
    "a negative step": (f"step/{FC1}.weight", -1.0, r"is -1\.0; it must be"),
    "an infinite step": (f"step/{FC1}.weight", math.inf, r"is inf; it must be"),
    "a step to come": (f"step/{FC1}.weight", 9.0, r"is 9\.0; it must be"),
    "a negative history": (f"model/{FC1}.scaling.history", -1.0, r"history contains -1; it must be in"),
    "a history that is NaN": (f"model/{FC1}.scaling.history", math.nan, r"history contains nan; it must be in"),
    "an infinite scale of a cast": (f"model/{FC1}.scaling.scale", math.inf, r"scale contains inf; it must be in"),
    **{
        f"scale_inv {value:g} of a moment": (f"exp_avg/{FC1}.weight.scale_inv@0,0", value, f"has scale_inv {value:g}, which is not a power")
        for value in (0.0, math.inf, -1.0, 0.75)
    },
    "a stale scale of a weight": (f"model/{FC1}.weight.scale_inv@0,0", 2.0, "is .* but its master is"),
    "a huge moment": (f"exp_avg/{FC1}.weight.scale_inv@0,0", 2.0**100, "has the value .*; no run can use values above"),
    "a huge bias": (f"master/{FC1}.bias", 1e38, r"has the value 1e\+38; no run can use values above"),
}


@pytest.mark.promise("Checkpoints", "A save with a value that no load accepts is unhealthy, names tensor and value, and deletes nothing.")
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


@pytest.mark.parametrize(
    ("counter", "words"),
    [("consumed_samples", "consumed_samples is 2147483664; iteration 4 must have read 16"), ("passed_over", "it has passed_over -3")],
)
def test_an_impossible_counter_is_named(pairs: Callable[[str], Pair], tmp_path: Path, counter: str, words: str):
    pair = pairs("O3")
    before = getattr(pair.writes.training, counter)
    setattr(pair.writes.training, counter, {"consumed_samples": before + 2**31, "passed_over": -3}[counter])
    try:
        said, refused = verdicts(pair, tmp_path)
    finally:
        setattr(pair.writes.training, counter, before)
    assert said is not None
    assert words in said
    assert refused is not None


def test_impossible_random_states_are_named(pairs: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    states = rng.state()
    states["numpy.rest"][0] = 625
    monkeypatch.setattr(rng, "state", lambda: states)
    said, refused = verdicts(pairs("O3"), tmp_path)
    assert said == "its random states are invalid (numpy's generator has position 625, expected 0 to 624)"
    assert refused is not None
    assert said in refused
