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


def test_hyper_parameters_are_those_of_the_new_run(prefix: Path, tmp_path: Path):
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, opt_level="O2", train_iters=6, save=folder))
    changed = tiny.config(prefix, opt_level="O2", train_iters=8, load=folder, lr=1e-3, min_lr=1e-3, weight_decay=0.5, adam_beta2=0.5)
    with tiny.trainer(changed) as made:
        groups = made.training.optimizer.param_groups
        assert {group["lr"] for group in groups} == {1e-3}
        assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
        assert {tuple(group["betas"]) for group in groups} == {(0.9, 0.5)}


def test_another_global_batch_is_refused_by_name(prefix: Path, tmp_path: Path):
    folder = str(tmp_path / "saved")
    tiny.run(tiny.config(prefix, train_iters=4, save=folder))
    with pytest.raises(ValueError, match=r"--global-batch-size 8 \(saved: 4\)"):
        tiny.run(tiny.config(prefix, train_iters=8, load=folder, global_batch_size=8))


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


SHAPES = {
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True},
    "grouped queries": {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "rotary_percent": 0.5},
}


PAIRS = [("learned positions", "O1"), ("llama", "O3"), ("grouped queries", "bf16")]
OTHERS = [(shape, level) for shape in SHAPES for level in ("fp32", "bf16", "O1", "O2", "O3") if (shape, level) not in PAIRS]


@pytest.mark.parametrize(("shape", "level"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in OTHERS)])
def test_every_shape_trains_at_every_level(prefix: Path, shape: str, level: str):
    losses = tiny.losses(tiny.run(tiny.config(prefix, precision=level, train_iters=12, **SHAPES[shape])))
    assert losses[-1] < losses[0] - 0.2
