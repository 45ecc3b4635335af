"""FP16 with a loss scale in the trainer: as FP32 but for rounding, recovery from overflow, a constant scale, an end below the least."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.errors import RunStopped
from megatron.lm.run import trainer
from megatron.lm.step import train_step
from megatron.lm.training.state import Batches, StepResult, Training
from msamp.fp16.scaler import LossScaler

FIRST = "decoder.layers.1.mlp.linear_fc2.weight"


def scales(rows: list[dict[str, Any]]) -> list[float]:
    """The loss scale after each step."""
    return [row["loss_scale"] for row in rows if row["kind"] == "train"]


def skipped(rows: list[dict[str, Any]]) -> list[bool]:
    """Whether each step was skipped."""
    counts = [row["skipped"] for row in rows if row["kind"] == "train"]
    return [after > before for before, after in zip([0, *counts], counts, strict=False)]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Iterations, to be filled in, in which a gradient becomes NaN."""
    chosen: set[int] = set()

    def changed(training: Training, stream: Batches, *watchers: Any) -> StepResult:
        weight, bad = dict(training.model.named_parameters())[FIRST], training.iteration + 1 in chosen
        handle = weight.register_hook(lambda g: g * math.nan if bad else g)
        try:
            return train_step(training, stream, *watchers)
        finally:
            handle.remove()

    monkeypatch.setattr(trainer, "train_step", changed)
    return chosen


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.nightly, id="dynamic"),
        pytest.param({"loss_scale": 8.0}, marks=pytest.mark.nightly, id="8"),
        pytest.param({"global_batch_size": 8, "swiglu": True}, id="llama"),
    ],
)
def test_losses_are_those_of_fp32_but_for_rounding(prefix: Path, settings: dict[str, Any]):
    """Within 1e-3: FP16 rounds at 2^-11, eight times finer than BF16. Largest seen: 4e-4."""
    shared = {key: value for key, value in settings.items() if key != "loss_scale"}
    wide = tiny.run(tiny.config(prefix, precision="fp32", train_iters=10, **shared))
    narrow = tiny.run(tiny.config(prefix, fp16=True, train_iters=10, **settings))
    assert tiny.losses(narrow) == pytest.approx(tiny.losses(wide), rel=1e-3)
    norms = [[row["grad_norm"] for row in rows if row["kind"] == "train"] for rows in (narrow, wide)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)  # of the unscaled gradient
    assert set(scales(narrow)) == {settings.get("loss_scale", 2.0**16)}
    assert not any(skipped(narrow))
    (sizes,) = (row["bytes_per_parameter"] for row in narrow if row["kind"] == "precision")
    assert sizes == {"weight": 2.0, "master": 4.0, "grad": 4.0, "m": 4.0, "v": 4.0}


def test_recovery_from_overflow(prefix: Path, capsys: pytest.CaptureFixture[str]):
    """From far too high a scale down to one that fits, and up again; skipped steps leave the schedule and the run's count alone."""
    moving = {"initial_loss_scale": 2.0**24, "loss_scale_window": 5, "hysteresis": 2, "max_skipped_steps": 3}
    rows = tiny.run(tiny.config(prefix, fp16=True, train_iters=24, **moving))
    trace, bad = scales(rows), skipped(rows)
    twin, want = LossScaler(init_scale=2.0**24, growth_interval=5, hysteresis=2), []
    for overflow in bad:
        twin.update(torch.tensor(overflow))
        want.append(float(twin.scale(torch.device("cpu"))))
    assert trace == want
    assert bad[:4] == [True] * 4  # more in a row than --max-skipped-steps
    assert trace[:3] == [2.0**24, 2.0**23, 2.0**22]
    assert not all(bad[10:])
    assert any(after > before for before, after in itertools.pairwise(trace))
    assert [row["lr"] for row in rows if row["kind"] == "train"][: bad.index(False) + 1] == [0.0] * (bad.index(False) + 1)
    assert tiny.losses(rows)[-1] < tiny.losses(rows)[0] - 0.1
    said = capsys.readouterr().out
    assert "skipped iteration 2 (the loss scale is 8.38861e+06 now); not finite: rank 0: the gradient of" in said
    assert f"  loss scale {trace[-1]:g}  norm" in said
    assert [row["loss_scale"] for row in rows if row["kind"] == "skipped"][:3] == trace[:3]


def test_a_run_ends_where_the_loss_scale_falls_below_the_least(prefix: Path, tmp_path: Path, spoiled: set[int]):
    spoiled |= set(range(4, 30))
    limits = {"initial_loss_scale": 2.0**12, "min_loss_scale": 2.0**10, "hysteresis": 2, "max_skipped_steps": 1}
    settings = tiny.config(prefix, fp16=True, train_iters=30, save=str(tmp_path), save_interval=3, **limits)
    with pytest.raises(RunStopped) as stopped:
        tiny.run(settings)
    parts = ("fell to 512 at iteration 7", "below --min-loss-scale 1024", f"rank 0: the gradient of {FIRST}", "lower --lr", "(--bf16)")
    for part in parts:  # one overflow is forgiven, three halve the scale
        assert part in str(stopped.value)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_a_checkpoint_below_the_least_scale_is_refused_and_other_levels_start_it_anew(prefix: Path, tmp_path: Path):
    def first_scale(**settings: Any) -> float:
        with tiny.trainer(tiny.config(prefix, fp16=True, load=str(tmp_path / "fp16"), train_iters=3, **settings)) as made:
            assert made.training.loss_scaler is not None
            assert made.training.iteration == 2
            return made.training.loss_scaler.state_dict()["loss_scale"]

    for name in ("fp16-amp", "bf16"):
        scale = {"initial_loss_scale": 64.0} if name == "fp16-amp" else {}
        tiny.run(tiny.config(prefix, precision=name, train_iters=2, save=str(tmp_path / name[:4]), **scale))
    assert first_scale() == 64.0
    assert first_scale(loss_scale=8.0) == 8.0
    assert first_scale(no_load_optim=True) == 2.0**16
    with pytest.raises(ValueError, match=r"the loss scale in .* is 64, below --min-loss-scale 128: lower it"):
        first_scale(min_loss_scale=128.0)
    with tiny.trainer(tiny.config(prefix, fp16=True, load=str(tmp_path / "bf16"), train_iters=3)) as made:
        assert made.training.loss_scaler is not None
        assert made.training.loss_scaler.state_dict()["loss_scale"] == 2.0**16


def test_small_gradients_need_the_scale(prefix: Path):
    """Of the first gradient's elements; divided by 2^10 (a static scale of 2^-10) most are lost in FP16."""

    def vanished(scale: float) -> float:
        found: list[Tensor] = []
        with tiny.trainer(tiny.config(prefix, fp16=True, loss_scale=scale, train_iters=1, lr_warmup_iters=0)) as made:
            for p in made.training.model.parameters():
                p.register_hook(lambda g: found.append((g == 0).float().mean()) if g.dim() > 1 else None)
            made.run()
        return float(torch.stack(found).mean())

    assert vanished(2.0**-10) > vanished(1.0) + 0.1
    assert vanished(2.0**12) < vanished(1.0)
