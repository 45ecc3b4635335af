import csv
import json
import sys

import pytest
import torch

from helpers import dist, replayed
from msamp.numerics import recipe
from tools.bench import bench_step

TINY = "--seq-length 16 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --lr-warmup-iters 1"


def measure_all(folder: str) -> list[dict[str, str]]:
    """In a process of its own: the benchmark makes the process groups."""
    peer = f"{sys.executable} {folder}/bench_peer.py"
    arguments = ["--levels", "O0", "O2", "--preset", "125m", "--micro-batch-size", "2", "--vocab-size", "64", "--warm-up", "1"]
    arguments += ["--steps", "2", f"--flags={TINY}", "--csv", f"{folder}/step.csv", "--commit", "abc1234", "--peer", peer]
    assert bench_step.main(arguments) == 0
    flags = f"{TINY} --record-precision {folder}/r.jsonl --record-interval 1"
    settings = {"preset": "125m", "micro_batch_size": 2, "vocab_size": 64, "warm_up": 1, "steps": 2, "flags": flags, "as_stage": False}
    options = bench_step.argparse.Namespace(**settings)
    assert bench_step.measure("O2", options)["case"] == "O2 recorded every 1"
    with replayed.on_a_cpu():
        several = {"flags": f"{TINY} --global-batch-size 6 --fp8-recipe tensorwise", "as_stage": True, "warm_up": 4}
        found = bench_step.measure("O2", bench_step.argparse.Namespace(**{**settings, **several}))
    assert found["case"] == "O2 (as a stage)"
    assert found["tokens_s_gpu"] == pytest.approx(3 * 2 * 16 / (found["ms"] / 1e3), rel=0.05)
    with open(f"{folder}/step.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.nightly
def test_our_levels_and_a_peer_stand_in_one_table(tmp_path):
    printed = [{"case": "bf16", "ms": 1.5, "tokens_s_gpu": 7}, {"case": "te", "error": "OutOfMemoryError"}]
    lines = "".join(f"print({json.dumps(json.dumps(row))})\n" for row in printed)
    (tmp_path / "bench_peer.py").write_text("print('chatter')\n" + lines)
    (table,) = dist.run(measure_all, 1, str(tmp_path), init=False)
    assert [row["case"] for row in table] == ["O0", "O2", "peer bf16", "peer te (OutOfMemoryError)"]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 3
    assert {row["commit"] for row in table} == {"abc1234"}
    for row in table[:2]:
        assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert int(row["tokens_s_gpu"]) == pytest.approx(2 * 16 / (float(row["ms"]) / 1e3), rel=0.05)
        assert 3.0 < float(row["loss"]) < 5.0
    assert table[2]["tokens_s_gpu"] == "7"
    assert table[3]["ms"] == ""


@pytest.mark.parametrize("level", ["O0", *recipe.names()])
def test_every_precision_has_a_configuration(level):
    options = bench_step.argparse.Namespace(preset="125m", micro_batch_size=1, flags="")
    assert bench_step.configuration(level, options).precision.name == ("bf16" if level == "O0" else level)


def test_a_level_has_flags_of_its_own_beside_those_of_all(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "step.csv"
    monkeypatch.setattr(bench_step.process_groups, "initialize", lambda config: None)
    monkeypatch.setattr(bench_step, "measure", lambda level, options: {"case": level, "seen": seen.append((level, options.flags))})
    case, vocabulary = "O3 --output-layer-precision fp8", ["--vocab-size", "128256"]
    assert (
        bench_step.main(["--levels", "O2", case, "--preset", "llama3-8b", "--flags=--num-layers 8", *vocabulary, "--csv", str(file)]) == 0
    )
    with file.open(newline="") as stream:
        assert [(row["case"], row["preset"]) for row in csv.DictReader(stream)] == [
            ("O2", "llama3-8b --num-layers 8 --vocab-size 128256"),
            (case, "llama3-8b --num-layers 8 --vocab-size 128256"),
        ]
    options = bench_step.argparse.Namespace(preset="llama3-8b", micro_batch_size=1, flags="--num-layers 8")
    config = bench_step.configuration(case, options)
    assert (config.model.num_layers, config.precision.name, config.precision.output_layer_precision) == (8, "O3", "fp8")


@pytest.mark.parametrize("preset", ["125m", "13b"])
def test_the_configuration_is_for_one_process_at_any_size(preset):
    options = bench_step.argparse.Namespace(preset=preset, micro_batch_size=1, flags="")
    config = bench_step.configuration("O2", options)
    assert config.parallel.tensor_model_parallel_size == 1
    assert not config.parallel.sequence_parallel
    assert config.num_micro_batches(1) == 1


def test_random_batches_repeat_and_shift_the_labels_by_one():
    options = bench_step.argparse.Namespace(preset="125m", micro_batch_size=3, flags=TINY)
    stream = bench_step.random_batches(bench_step.configuration("O0", options), 64, torch.device("cpu"))
    first, second = next(stream), next(stream)
    assert first is second
    assert first["tokens"].shape == (3, 16)
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    assert int(first["tokens"].max()) < 64
