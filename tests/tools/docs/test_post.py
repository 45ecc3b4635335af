"""Tables of what comes after pre-training: with rows by hand, and where none is recorded."""

import csv

import pytest

from tools.docs import cells, evidence, post

PLACE = {"date": "2026-11-23", "commit": "0123456", "gpu": "NVIDIA H200", "driver": "", "torch": "2.11.0"}
SFT = {"model": "smollm2", "parameters": "134515008", "recipe": "O0", "dtype": "bf16", "lora_rank": "0", "seq_length": "1024",
       "global_batch_size": "8", "steps": "60", "seed": "1", "loss_last": "1.2345", "valid_loss_before": "1.5", "valid_loss_after": "1.25",
       "tokens_per_s": "1000.0", "weight_bytes": "2.000",
       "gradient_bytes": "2.000", "master_bytes": "4.000", "moment_bytes": "8.000", "peak_bytes": "40.0"}  # fmt: skip
DPO = {"model": "m", "dtype": "bf16", "global_batch_size": "8", "steps": "9", "seed": "1", "recipe": "O0", "loss_first": "0.6931",
       "loss_last": "0.6", "accuracy_last": "0.75", "pairs_per_s": "3.00", "policy_weight_mib": "256",
       "reference_weight_mib": "256", "state_mib": "1536", "peak_mib": "4000"}  # fmt: skip
PPO = {"model": "m", "dtype": "bf16", "reward": "arithmetic", "global_batch_size": "64", "steps": "90", "seed": "1", "recipe": "O0",
       "reward_first": "0.1", "reward_last": "0.8", "kl_last": "0.5", "s_per_step": "", "weight_mib": "768",
       "state_mib": "3000", "gradient_mib": "512", "peak_mib": "9000"}  # fmt: skip
ENCODER = {"precision": "bf16-d", "phase": "phase1", "steps": "9", "train_loss": "6", "valid_loss": "5.5", "ppl": "244.69", "peak_gib": ""}
BOOLQ = {"precision": "bf16-d", "tuned_at": "bf16-d", "seed": "1", "steps": "9", "loss_first": "0.7", "loss_last": "0.6",
         "accuracy": "0.62", "majority": "0.6217"}  # fmt: skip
TOLD = {"model": "smollm2", "task": "piqa", "metric": "acc", "value": "0.62", "stderr": "0.01"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout without rows."""
    monkeypatch.setattr(post, "ROOT", tmp_path)
    monkeypatch.setattr(post, "read", lambda name: evidence.read(name, tmp_path))
    return tmp_path


def write(root, name, *rows):
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*PLACE, *rows[0]])
        writer.writeheader()
        writer.writerows(PLACE | row for row in rows)


def lines(table):
    assert {len(each) for each in table.cells} == {len(table.columns)}
    assert "commit 0123456, NVIDIA H200" in table.markdown()
    return [dict(zip(table.columns, each, strict=True)) for each in table.cells]


@pytest.mark.parametrize("name", post.TABLES)
def test_without_rows_the_table_says_so(root, name):
    table = post.TABLES[name]()
    assert isinstance(table, cells.Absent)
    assert table.markdown() == f"No GPU measurement is recorded for the table of {name.replace('-', ' ')}."
    assert not table.sources


def test_falls_of_the_first_steps_are_compared_by_seed(root):
    base = SFT | {"valid_loss_before": "1.6", "valid_loss_after": "1.5"}
    other = base | {"recipe": "O2", "valid_loss_before": "1.7", "valid_loss_after": "1.5"}
    write(root, post.STARTS, base, base | {"seed": "2", "valid_loss_after": "1.4"}, base | {"dtype": "fp32", "valid_loss_after": "1.35"},
          other, other | {"seed": "2", "valid_loss_after": "1.3"})  # fmt: skip
    assert [list(line.values()) for line in lines(post.starts())] == [
        ["`O0`", "BF16", "2", "0.1500", "1.00 (1.00 to 1.00)"],
        ["`O0`", "FP32", "1", "0.2500", "2.50"],
        ["`O2`", "BF16", "2", "0.3000", "2.00 (2.00 to 2.00)"],
    ]


def test_levels_stand_beside_o0_of_the_same_setting(root):
    write(root, post.SFT, SFT, SFT | {"recipe": "O3", "tokens_per_s": "1270", "peak_bytes": "30"}, SFT | {"recipe": "O2", "steps": "7"})
    first, alone, o3 = lines(post.sft())
    assert (first["from O0"], first["peak GiB"], first["states"]) == ("", "5.01", "12.00")
    assert (o3["level"], o3["from O0"], o3["memory from O0"]) == ("`O3`", "+27 %", "-25 %")
    assert alone["from O0"] == ""
    write(root, post.DPO, DPO, DPO | {"recipe": "O3", "state_mib": "768"})
    assert lines(post.dpo())[1]["from O0"] == "-50 %"
    write(root, post.PPO, PPO, PPO | {"recipe": "O3", "weight_mib": "576", "state_mib": "1500"})
    assert [lines(post.ppo())[1][key] for key in ("from O0", "states from O0", "s/step")] == ["-25 %", "-50 %", ""]


def test_seeds_of_the_newest_commit_are_averaged(root):
    old = {"commit": "7654321", "tokens_per_s": "1"}
    write(root, post.SFT, SFT | old, SFT, SFT | {"seed": "2", "tokens_per_s": "3000.0"}, SFT | {"recipe": "O3", "loss_last": ""},
          SFT | {"recipe": "O3", "seed": "2", "tokens_per_s": "2000.0"})  # fmt: skip
    base, o3 = lines(post.sft())
    assert (base["seeds"], base["tokens/s"], o3["tokens/s"], o3["from O0"]) == ("2", "2000", "1500", "-25 %")
    assert o3["loss"] == ""
    assert len(post.sft().sources[0][1]) == 4
    write(root, post.PPO, PPO | {"commit": "7654321", "reward_last": "0.1"}, PPO, PPO | {"seed": "2", "reward_last": "0.6"},
          PPO | {"reward": "digits"})  # fmt: skip
    assert [(line["reward"], line["seeds"], line["last 10"]) for line in lines(post.ppo())] == [
        ("arithmetic", "2", "0.700"), ("digits", "1", "0.800")
    ]  # fmt: skip


def test_speeds_are_medians_and_other_values_means(root):
    """One slow run, of a host that was busy, is not in the speed; results.md has medians too."""
    runs = [SFT | {"seed": seed, "tokens_per_s": speed, "loss_last": loss}
            for seed, speed, loss in (("1", "900", "1.0"), ("2", "1000", "1.0"), ("3", "100", "1.3"))]  # fmt: skip
    write(root, post.SFT, *runs)
    (line,) = lines(post.sft())
    assert (line["tokens/s"], line["loss"]) == ("900", "1.100")


def test_of_several_rows_of_a_seed_the_last_counts(root):
    """A repeated run is no second seed."""
    write(root, post.SFT, SFT, SFT | {"seed": "2", "loss_last": "2.0"}, SFT | {"loss_last": "1.0"})
    (line,) = lines(post.sft())
    assert (line["seeds"], line["loss"]) == ("2", "1.500")
    write(root, post.PPO, PPO, PPO | {"seed": "2", "reward_last": "0.6"}, PPO | {"reward_last": "0.4"})
    (line,) = lines(post.ppo())
    assert (line["seeds"], line["last 10"]) == ("2", "0.500")


def test_newer_runs_of_lora_hide_no_run_of_all_weights(root):
    write(root, post.SFT, SFT, SFT | {"seed": "2", "loss_last": "9", "lora_rank": "8", "commit": "7654321"})
    assert [(line["seeds"], line["loss"]) for line in lines(post.sft())] == [("1", "1.234")]


def test_another_dtype_is_not_averaged_in(root):
    write(root, post.SFT, SFT, SFT | {"seed": "2", "loss_last": "9", "dtype": "fp32"})
    assert [(line["seeds"], line["loss"]) for line in lines(post.sft())] == [("1", "1.234"), ("1", "9.000")]
    write(root, post.PPO, PPO, PPO | {"seed": "2", "dtype": "fp32", "reward_last": "0.2"})
    assert [(line["seeds"], line["last 10"]) for line in lines(post.ppo())] == [("1", "0.800"), ("1", "0.200")]


def test_encoders_and_boolq(root):
    write(root, post.ENCODERS, ENCODER)
    assert lines(post.encoders())[0]["perplexity"] == "244.7"
    write(root, post.BOOLQ, BOOLQ)
    assert lines(post.boolq())[0]["accuracy %"] == "62.0"


def test_models_are_columns_and_of_two_rows_the_last_counts(root):
    other = {"task": "text", "metric": "bits_per_byte", "value": "0.99716", "stderr": ""}
    write(root, post.EVALUATION, TOLD, TOLD | {"value": "0.64"}, TOLD | {"model": "sft-O3", "value": "0.6"}, TOLD | other,
          TOLD | {"metric": "nats"})  # fmt: skip
    assert lines(post.evaluation()) == [
        {"task": "piqa", "metric": "acc", "`smollm2`": "0.640 ± 0.010", "`sft-O3`": "0.600 ± 0.010"},
        {"task": "text", "metric": "bits_per_byte", "`smollm2`": "0.9972", "`sft-O3`": ""},
    ]
