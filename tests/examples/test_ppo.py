"""examples/rlhf/ppo.py: the reward rises, four models keep what Table 4 says, it goes on bit for bit, and bad input is one line."""

import re

import pytest

from helpers import post_runs
from megatron.lm.post import saved


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    post_runs.toy(folder / "toy")
    post_runs.toy(folder / "judge", reward=True, seed=7)
    post_runs.sums(folder / "sums.jsonl", 12)
    return folder


def run(made, save, **settings):
    given = {"load": made / "toy", "save": save, "dtype": "bf16", "lr": 3e-3, "train_iters": 3, "max_new_tokens": 8, "log_interval": 4,
             "global_batch_size": 16, "mini_batch_size": 8, "kl_coef": 0.02} | settings  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return post_runs.example("rlhf/ppo.py").main(words)


def by_model(made, save, **settings):
    return run(made, save, reward_model=made / "judge", data=made / "sums.jsonl", **settings)


@pytest.mark.parametrize("level", [pytest.param(level, marks=pytest.mark.nightly(30)) for level in ("O0", "O2", "O3")])
def test_the_reward_rises(made, tmp_path, level):
    from transformers import AutoModelForCausalLM

    more = {"global_batch_size": 64, "mini_batch_size": 32, "train_iters": 12}
    assert run(made, tmp_path / "run", reward="digits", opt_level=level, rows=tmp_path / "rows.csv", **more) == 0
    found = post_runs.metrics(tmp_path / "run")
    assert abs(found[0]["kl"]) < 1e-6  # policy and reference compute the same before the first update, in FP8 too
    assert sum(row["reward"] for row in found[-3:]) > 2 * sum(row["reward"] for row in found[:3])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def cells(file):
    header, *lines = (line.split(",") for line in file.read_text().splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_four_models_take_less_in_fp8_and_a_frozen_one_has_no_states(made, tmp_path, capsys):
    for level in ("O0", "O3"):
        assert by_model(made, tmp_path / level, opt_level=level, rows=tmp_path / "rows.csv") == 0
    plain, low = cells(tmp_path / "rows.csv")
    assert (plain["models"], plain["parameters"]) == ("4", low["parameters"])
    parameters = int(plain["parameters"])
    assert float(plain["weight_mib"]) * 2**20 == pytest.approx(2 * parameters, rel=0.01)
    # of a linear weight 2 -> 1 bytes of weight and 12 -> 5 of states; the embedding of so small a model is a fifth of it
    assert float(low["weight_mib"]) < 0.65 * float(plain["weight_mib"])
    assert float(low["state_mib"]) < 0.6 * float(plain["state_mib"])
    told = capsys.readouterr().out
    assert len(re.findall(r"^(?:reference|reward_model) .* states +0.000, gradients +0.000$", told, re.MULTILINE)) == 4


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.nightly(3)), "O3"])
def test_it_goes_on_bit_for_bit(made, tmp_path, level):
    settings = {"opt_level": level, "save_interval": 2, "kl_target": 0.5, "train_iters": 4}
    assert by_model(made, tmp_path / "run", **settings) == 0
    whole, found = (tmp_path / "run/model/model.safetensors").read_bytes(), post_runs.metrics(tmp_path / "run")
    assert found[3]["kl_coef"] != found[1]["kl_coef"]
    saved.checkpoints(tmp_path / "run")[-1].unlink()
    (tmp_path / "run/model").rename(tmp_path / "before")
    assert by_model(made, tmp_path / "run", **settings) == 0
    assert post_runs.metrics(tmp_path / "run") == found
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "give either --reward or --reward-model"),
        ({"reward": "digits", "data": "a"}, "--reward-model and --data require each other"),
        ({"reward": "wit"}, "invalid choice: 'wit'"),
        ({"reward": "digits", "seq_length": 12}, r"prompt \d+ has \d+ tokens, and with --max-new-tokens 8 more than --seq-length 12"),
        ({"reward": "digits", "seq_length": 1024}, "has positions for 512 tokens"),
        ({"reward": "digits", "mini_batch_size": 5}, "is not a multiple of --mini-batch-size 5"),
        ({"reward": "digits", "temperature": 0}, "--temperature 0.0 is out of range"),
        ({"reward": "digits", "lam": 2}, "--lam 2.0 is out of range"),
        ({"reward": "digits", "kl_coef": -1}, "--kl-coef -1.0 is out of range"),
        ({"reward": "digits", "opt_level": "O9"}, "precision 'O9' is unknown"),
        ({"reward": "digits", "load": "none"}, "has no config.json"),
    ],
)
def test_bad_input_is_one_line_and_code_2_before_anything_is_written(made, tmp_path, capsys, settings, said):
    post_runs.assert_refused(lambda: run(made, tmp_path / "run", **settings), tmp_path / "run", capsys, said)
