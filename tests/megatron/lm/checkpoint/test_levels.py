"""A checkpoint of one precision loaded at another: what the new formats hold stays, what they do not is rounded once, training goes on."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm import checkpoint
from megatron.lm.checkpoint import CheckpointReader, iteration_folder
from megatron.lm.checkpoint.place import names_of
from megatron.lm.checkpoint.values import StoredTensor, find_whole
from megatron.lm.config import Config
from megatron.lm.run.trainer import Trainer
from msamp.numerics.formats import E4M3, FP16, PLAIN_FP16, Format, by_name, of_dtype
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.states import is_own_master

LEVELS = ("fp32", "fp16-amp", "bf16", "O1", "O2", "O3")
# Each level to the next and back.
PAIRS = [pair for level, other in itertools.pairwise((*LEVELS, LEVELS[0])) for pair in ((level, other), (other, level))]
# Of Collage's options the largest relative error of a weight and of a second moment when they come from FP32: half a step of BF16, or of
# the second component, which is at most half a step of the first; E4M3's error is at most 1/16 of that half.
ONE, TWO, EIGHT_BITS = 2.0**-8, 2.0**-16, 2.0**-12
COLLAGE = {
    "bf16-a": (ONE, ONE),
    "bf16-kahan": (TWO, ONE),
    "bf16-dmw": (ONE, 0.0),
    "bf16-d": (0.0, 0.0),
    "collage-light": (TWO, ONE),
    "collage-plus": (TWO, TWO),
    "collage-fp8": (EIGHT_BITS, EIGHT_BITS),
}
SLOW = functools.partial(pytest.param, marks=pytest.mark.nightly)
SAVED, LAST = 6, 9
# Largest relative difference of a loss from that of staying at the level: of the next step, whose difference is that of the formats in
# forward, and of the two after it. Largest seen: 5e-4, 6e-4.
NEXT, LATER = 1.5e-3, 2e-3


def settings(prefix: Path, level: str, **more: Any) -> Config:
    """`level` may name other states, as in "O3+coat"."""
    precision, *states = level.split("+")
    shared = {"swiglu": True, "train_iters": LAST, "exit_interval": LAST, "hidden_size": 64}
    return tiny.config(prefix, precision=precision, optimizer_state=states[0] if states else None, **{**shared, **more})


def train(made: Trainer) -> list[float]:
    rows: list[dict[str, Any]] = []
    made.metrics.write = rows.append  # type: ignore[method-assign]
    made.run()
    return tiny.losses(rows)


@pytest.fixture(scope="module")
def stayed(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], Path]]:
    """By level the losses of the steps after the checkpoint, of a run that was not disturbed, and where that is; when first asked for."""

    class Runs(dict):
        def __missing__(self, level: str) -> tuple[list[float], Path]:
            folder = tmp_path_factory.mktemp(level)
            with tiny.trainer(settings(prefix, level, save=str(folder), save_interval=SAVED)) as made:
                self[level] = (train(made)[SAVED:], folder)
            return self[level]

    return Runs()


def convert(prefix: Path, source: Path, level: str, target: Path) -> list[float]:
    """Load at `level`, save again, and train to the end; its losses."""
    with tiny.trainer(settings(prefix, level, load=str(source), ckpt_step=SAVED)) as made:
        assert made.training.iteration == SAVED
        checkpoint.save(made.training, target)
        return train(made)


def read(folder: Path) -> CheckpointReader:
    return CheckpointReader(iteration_folder(folder, SAVED))


def state(saved: CheckpointReader, key: str, name: str) -> StoredTensor:
    """`best`: the master where there is one, else the weight."""
    if key == "best":
        key = "master" if f"master/{name}" in saved.stored.tensors else "model"
    return saved._find(key, name)


def fmt_of(found: StoredTensor) -> Format:
    fmt = of_dtype(found.payload.dtype)
    return PLAIN_FP16 if fmt is FP16 and not found.scales else fmt


def half_step(found: StoredTensor) -> Tensor:
    """Largest error of a rounding to nearest into the format and scale of `found`, for the values that it holds."""
    fmt, scale_inv = fmt_of(found), found.scale_inv
    exponent = torch.frexp(found.payload.float())[1] - 1
    step = torch.ldexp(torch.ones(()), exponent - fmt.mantissa_bits).clamp(min=fmt.smallest)
    return 0.5 * step * (1.0 if scale_inv is None else scale_inv)


def assert_rounded_once(before: StoredTensor, after: StoredTensor) -> None:
    """Equal bits in one format, equal values in one that holds them, else the nearest."""
    fmt, was = fmt_of(after), fmt_of(before)
    error = (after.values() - before.values()).abs()
    if fmt == was:
        assert tiny.same(tiny.bits([before.payload]), tiny.bits([after.payload])), after.key
        assert before.scale_inv == after.scale_inv
    elif fmt.mantissa_bits >= was.mantissa_bits:
        assert not error.any(), after.key
    else:
        assert (error <= half_step(after)).all(), after.key


def check_conversion(before: CheckpointReader, after: CheckpointReader) -> None:
    """Weights, masters and moments of all tensors, in the formats of the new level."""
    formats = set()
    assert before.names() == after.names()
    for name in before.names():
        for key in ("best", "exp_avg", "exp_avg_sq"):
            assert_rounded_once(state(before, key, name), state(after, key, name))
            formats.add((key, fmt_of(state(after, key, name))))
        assert float(after.stored.tensor(f"step/{name}")) == SAVED
        weight, was, best = after._find("model", name), before._find("model", name), state(before, "best", name).values()
        # From the best values there are, not from a weight that was rounded before.
        if fmt_of(weight) == E4M3 != fmt_of(was):
            assert tiny.same(tiny.bits([weight.payload]), tiny.bits([ScalingTensor.quantize(best, E4M3).payload]))
        elif fmt_of(weight) != fmt_of(was) and not fmt_of(weight).scaled:
            assert torch.equal(weight.payload, best.to(weight.payload.dtype))
    low = {"O1": {("best", FP16)}, "O2": {("best", FP16), ("exp_avg", E4M3), ("exp_avg_sq", FP16)}}
    low["O3"] = low["O2"]
    assert {pair for pair in formats if pair[1].scaled} == low.get(after.config.precision.name, set())


def check_losses(losses: list[float], staying: list[float]) -> None:
    assert losses[0] == pytest.approx(staying[0], rel=NEXT)
    assert losses == pytest.approx(staying, rel=LATER)
    assert losses[-1] < losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("level", "other"), PAIRS, ids=lambda level: level)
def test_every_level_from_every_other(prefix: Path, tmp_path: Path, stayed: dict[str, tuple[list[float], Path]], level: str, other: str):
    staying, folder = stayed[level]
    check_losses(convert(prefix, folder, other, tmp_path), staying)
    check_conversion(read(folder), read(tmp_path))


# Weights and second moments that are pairs


def pair_errors(before: CheckpointReader, after: CheckpointReader) -> tuple[float, float]:
    """Largest relative difference of what weights and second moments stand for."""
    errors = []
    for read_value in (CheckpointReader.values, lambda saved, name: saved._find("exp_avg_sq", name, find_whole).values()):
        a, b = (torch.cat([read_value(saved, name).flatten() for name in before.names()]) for saved in (before, after))
        errors.append(float(((a - b).abs() / a.abs().clamp(min=1e-30)).max()))
    return errors[0], errors[1]


@pytest.mark.parametrize("option", [option if option == "collage-plus" else SLOW(option) for option in COLLAGE])
def test_to_an_option_of_collage_and_back(prefix: Path, tmp_path: Path, stayed: dict[str, tuple[list[float], Path]], option: str):
    """Each way rounds no further than the formats say, and the pair's value goes into the FP32 master; training goes on."""
    staying, folder = stayed["bf16"]
    check_losses(convert(prefix, folder, option, tmp_path / "there"), staying)
    check_losses(convert(prefix, tmp_path / "there", "bf16", tmp_path / "back"), staying)
    start, there, back = (read(each) for each in (folder, tmp_path / "there", tmp_path / "back"))
    weight, v = pair_errors(start, there)
    assert weight <= COLLAGE[option][0]
    assert v <= COLLAGE[option][1]
    assert (weight > 0, v > 0) == (COLLAGE[option][0] > 0, COLLAGE[option][1] > 0)
    assert max(pair_errors(there, back)) <= 2.0**-24


# Weights without the optimizer's states

PAIRS = [("bf16", "O1"), ("O2", "fp16-amp"), ("fp16-amp", "O3"), ("O3", "O3"), ("O2", "fp32")]


@pytest.mark.parametrize(
    ("level", "other", "way"),
    [
        *(("fp32", "O3", "no_load_optim"), ("O3", "bf16", "finetune")),
        *(SLOW("fp32", "O3", "finetune"), SLOW("O3", "bf16", "no_load_optim")),
        *(SLOW(*pair, way) for pair in PAIRS for way in ("finetune", "no_load_optim")),
    ],
)
def test_masters_start_from_the_best_values(prefix: Path, stayed: dict[str, tuple[list[float], Path]], level: str, other: str, way: str):
    staying, folder = stayed[level]
    before = read(folder)
    with tiny.trainer(settings(prefix, other, load=str(folder), ckpt_step=SAVED, exit_interval=SAVED + 1, **{way: True})) as made:
        assert made.training.iteration == (0 if way == "finetune" else SAVED)
        optimizer = made.training.optimizer
        for group in optimizer.param_groups:
            fmt = by_name(group["formats"]["master"])
            for p in group["params"]:
                best, kept = before.values(names_of(made.training.model)[p]), optimizer.state.get(p, {})
                master = p if is_own_master(p, fmt) else kept["master"]
                assert torch.equal(fp32_values(master.detach()), fp32_values(ScalingTensor.quantize(best, fmt) if fmt.scaled else best))
                if not is_own_master(p, fmt):
                    assert not any(fp32_values(kept[key]).any() for key in ("step", "exp_avg", "exp_avg_sq"))
                else:
                    assert not kept
        losses = train(made)
    if way == "no_load_optim":
        assert losses == pytest.approx(staying[:1], rel=NEXT)
    assert losses[0] == pytest.approx(staying[0], rel=0.1)  # other data, but no step back


@pytest.mark.parametrize("way", [SLOW("finetune"), "no_load_optim"])
@pytest.mark.parametrize("option", ["collage-plus", SLOW("collage-light"), SLOW("bf16-kahan"), SLOW("collage-fp8")])
def test_a_weight_brings_its_second_component(
    prefix: Path, tmp_path: Path, stayed: dict[str, tuple[list[float], Path]], option: str, way: str
):
    """From an FP32 master the rest that BF16 leaves, from a pair its own bits; moments start anew."""
    with tiny.trainer(settings(prefix, option, load=str(stayed["bf16"][1]), ckpt_step=SAVED)) as made:
        checkpoint.save(made.training, tmp_path)
    saved = read(tmp_path)
    for folder in (tmp_path, stayed["bf16"][1]):
        with tiny.trainer(settings(prefix, option, load=str(folder), ckpt_step=SAVED, exit_interval=SAVED + 1, **{way: True})) as made:
            names = names_of(made.training.model)
            for holding in made.training.optimizer.holdings():
                kept, name = made.training.optimizer.state[holding.weight], names[holding.param]
                held = (holding.param.detach(), kept["weight_remainder"])
                was = (saved._find(key, name).payload for key in ("model", "weight_remainder"))
                assert tiny.same(tiny.bits(held), tiny.bits(was)), name
                assert not any(x.any() for key, x in kept.items() if key != "weight_remainder"), name
            losses = train(made)
    assert losses[0] == pytest.approx(stayed["bf16"][0][0], rel=NEXT if way == "no_load_optim" else 0.1)
