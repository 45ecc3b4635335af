"""What may change on resume, and what the flags of the new run say then; and models whose shapes the other tests leave out."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import tiny
from msamp.numerics.scaling import Delayed


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.nightly)])
def test_a_longer_run_takes_its_own_schedule(prefix: Path, tmp_path: Path, level: str):
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, opt_level=level, train_iters=6, save=folder))
    rows = tiny.run(tiny.config(prefix, opt_level=level, train_iters=12, load=folder))
    straight = tiny.run(tiny.config(prefix, opt_level=level, train_iters=12))
    rates = {row["iteration"]: row["lr"] for row in straight if row["kind"] == "train"}
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["iteration"] for row in trained] == [7, 8, 9, 10, 11, 12]
    assert [row["lr"] for row in trained] == pytest.approx([rates[i] for i in range(7, 13)])
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_another_schedule_is_refused_unless_a_flag_says_which(prefix: Path, tmp_path: Path):
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, train_iters=6, save=folder))
    resumed = {"train_iters": 12, "load": folder, "override_opt_param_scheduler": False}
    with pytest.raises(ValueError, match=r"--lr-decay-iters 12 \(saved: 6\) .or give --override-opt-param-scheduler"):
        tiny.run(tiny.config(prefix, **resumed))
    kept = tiny.run(tiny.config(prefix, **resumed, use_checkpoint_opt_param_scheduler=True, lr=1.0, save=str(tmp_path / "kept")))
    assert [row["lr"] for row in kept if row["kind"] == "train"] == pytest.approx([5e-4] * 6)
    assert len(tiny.losses(tiny.run(tiny.config(prefix, **resumed, lr_decay_iters=6)))) == 6
    # What was taken over is this run's schedule now.
    again = {"train_iters": 14, "lr_decay_iters": 6, "load": str(tmp_path / "kept"), "override_opt_param_scheduler": False}
    assert len(tiny.losses(tiny.run(tiny.config(prefix, **again)))) == 2
    assert len(tiny.losses(tiny.run(tiny.config(prefix, train_iters=7, load=folder, no_load_optim=True)))) == 1


RAMP = {"train_samples": 120, "global_batch_size": 16, "micro_batch_size": 2, "rampup_batch_size": [4, 4, 40], "lr_warmup_samples": 20}


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.nightly(2)), "O2"])
def test_a_run_resumes_in_mid_ramp_to_the_same_bits(prefix: Path, tmp_path: Path, level: str):
    shared = RAMP | {"opt_level": level, "micro_batch_size": 4, "hidden_dropout": 0.1 if level == "O0" else 0.0}
    straight = [row for row in tiny.run(tiny.config(prefix, **shared, eval_iters=1)) if row["kind"] == "train"]
    sizes = [4, 4, 4, 4, 8, 8, 12, 16, 16, 16, 16]
    assert [row["tokens"] for row in straight] == [16 * sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert [row["lr"] for row in straight[:6]] == pytest.approx([0.0, 1e-3, 2e-3, 3e-3, 4e-3, straight[5]["lr"]])
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, **shared, exit_interval=6, save=folder))
    resumed = [row for row in tiny.run(tiny.config(prefix, **shared, load=folder)) if row["kind"] == "train"]
    assert [(row["loss"], row["lr"]) for row in resumed] == [(row["loss"], row["lr"]) for row in straight[6:]]
    with pytest.raises(ValueError, match=r"--rampup-batch-size 8 4 40 to --global-batch-size 16 \(saved: 4 4 40, 32 samples read\)"):
        tiny.run(tiny.config(prefix, **(shared | {"rampup_batch_size": [8, 4, 40]}), load=folder))


def test_a_run_in_samples_is_that_of_its_iterations(prefix: Path, tmp_path: Path):
    shared = {"global_batch_size": 8, "lr_decay_style": "WSD"}
    by_iterations = tiny.run(tiny.config(prefix, **shared, lr_warmup_iters=2, lr_wsd_decay_iters=4, train_iters=10))
    in_samples = {"train_samples": 83, "lr_decay_samples": 80, "lr_warmup_samples": 16, "lr_wsd_decay_samples": 32}
    assert tiny.losses(tiny.run(tiny.config(prefix, **shared, **in_samples))) == pytest.approx(tiny.losses(by_iterations), rel=1e-4)
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, **shared, lr_warmup_iters=2, lr_wsd_decay_iters=4, train_iters=10, exit_interval=5, save=folder))
    rows = tiny.run(tiny.config(prefix, **shared, **in_samples, load=folder))  # the place of the schedule is converted
    assert tiny.losses(rows) == pytest.approx(tiny.losses(by_iterations)[5:], rel=1e-4)


def test_how_operands_are_scaled_is_the_checkpoint_s(prefix: Path, tmp_path: Path):
    folder, rule = str(tmp_path / "saved"), {"fp8_amax_history_len": 3, "fp8_amax_compute_algo": "most_recent", "fp8_margin": 1}
    straight = tiny.losses(tiny.run(tiny.config(prefix, opt_level="O2", train_iters=8, **rule)))
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=8, exit_interval=5, save=folder, **rule))
    with tiny.trainer(tiny.config(prefix, opt_level="O2", train_iters=8, load=folder)) as made:
        assert made.training.config.precision.fp8_amax_history_len == 3
        assert made.training.config.precision.recipe.gemm.input.scaling == Delayed(3, "most_recent", 1)
    resumed = tiny.losses(tiny.run(tiny.config(prefix, opt_level="O2", train_iters=8, load=folder)))
    assert resumed == straight[5:]
    assert straight[:5] != tiny.losses(tiny.run(tiny.config(prefix, opt_level="O2", train_iters=5)))
    other = tiny.config(prefix, opt_level="O2", train_iters=8, load=folder, fp8_amax_history_len=16)
    with pytest.raises(ValueError, match=r"--fp8-amax-history-len 16 \(saved: 3\). Drop the flag .*, or add --finetune"):
        tiny.run(other)
    tiny.run(replace(other, checkpoint=replace(other.checkpoint, finetune=True)))


UNUSUAL = {"squared_relu": True, "disable_bias_linear": True, "add_qkv_bias": True, "use_rope_scaling": True, "rope_scaling_factor": 4.0}


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.nightly(2)), "O3"])
def test_an_unusual_model_resumes_to_the_same_bits_and_its_rotation_may_change_with_finetune(prefix: Path, tmp_path: Path, level: str):
    folder, shared = str(tmp_path / "saved"), UNUSUAL | {"opt_level": level}
    straight = tiny.losses(tiny.run(tiny.config(prefix, **shared)))
    tiny.run(tiny.config(prefix, **shared, exit_interval=4, save=folder))
    assert tiny.losses(tiny.run(tiny.config(prefix, **shared, load=folder))) == straight[4:]
    other = shared | {"rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": 2.0}
    with pytest.raises(ValueError, match=r"--rotary-seq-len-interpolation-factor 2.0 \(saved: None\); --rope-scaling-factor 8.0 \(saved"):
        tiny.run(tiny.config(prefix, **other, load=folder))
    assert len(tiny.losses(tiny.run(tiny.config(prefix, **other, load=folder, finetune=True, train_iters=2, seed=77)))) == 2  # other data
    with pytest.raises(ValueError, match=r"--squared-relu False \(saved: True\)"):
        tiny.run(tiny.config(prefix, **shared | {"squared_relu": False}, load=folder, finetune=True))
