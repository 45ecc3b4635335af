"""After pre-training: what is made of rows, against rows by hand; a toy of each runs nightly (test_registry.py)."""

import math
from pathlib import Path

import pytest

from tools.docs import rounding
from tools.docs.evidence import ROOT, read
from tools.reproduce import post, throughput
from tools.reproduce.entry import Task
from tools.reproduce.registry import ENTRIES

SFT = {"model": "big", "parameters": "7000", "recipe": "O0", "seed": "1", "tokens_per_s": "100", "peak_bytes": "20",
       "valid_loss_after": "", "commit": "0123456"}  # fmt: skip
PPO = {"recipe": "O0", "seed": "1", "weight_mib": "100", "state_mib": "80", "gradient_mib": "20", "reward_first": "0.25",
       "reward_last": "0.5", "reward": "digits", "kl_last": "3", "steps": "2", "commit": "new", "gpu": "H200"}  # fmt: skip
KEPT = Task("kept", "whole", Path("text"), Path("folder"))
ENCODER = {"precision": "bf16-d", "phase": "phase1", "ppl": "8"}


def by_name(found):
    return {finding.quantity: finding for finding in found if finding.x is None}


def test_fine_tuning_is_told_from_o0_of_the_same_model_and_the_paper_stands_beside_the_largest():
    small = {"model": "small", "parameters": "70", "valid_loss_after": "2.0"}
    rows = [SFT, SFT | small, SFT | small | {"recipe": "O3", "tokens_per_s": "90", "valid_loss_after": "2.1"},
            SFT | {"recipe": "O3", "tokens_per_s": "130", "peak_bytes": "16"},
            SFT | {"model": "huge", "parameters": "9000", "recipe": "O3"}]  # fmt: skip
    curve = {"run": "sft", "recipe": "O3", "step": "2", "quantity": "loss", "value": "1.5"}
    found = list(post.sft_findings(rows, [curve, curve | {"run": "ppo"}, curve | {"quantity": "valid_loss"}]))
    lines = by_name(found)
    assert (lines["O3: throughput from O0's at 0123456"].ours, lines["O3: throughput from O0's at 0123456"].paper) == (
        pytest.approx(30),
        27,
    )
    assert (lines["O3: peak memory from O0's"].ours, lines["O3: peak memory from O0's"].paper) == (pytest.approx(-20), -14)
    assert (lines["O3, small: throughput from O0's at 0123456"].ours, lines["O3, small: throughput from O0's at 0123456"].paper) == (
        pytest.approx(-10),
        None,
    )
    own = "held-out loss from O0's, each read in its own precision"
    assert lines[f"O3, small: {own}"].ours == pytest.approx(5)
    assert f"O3: {own}" not in lines
    assert [(each.quantity, each.x, each.ours) for each in found if each.x is not None] == [("O3, training loss", 2.0, 1.5)]
    with pytest.raises(ValueError, match="no fine-tuning result at O0"):
        list(post.sft_findings([SFT | {"recipe": "O3"}]))


def test_tuning_by_seed_is_that_of_its_table():
    """Of the rows on file, whose table on the results page has the same intervals."""
    found = {finding.quantity: finding.ours for finding in post.tuned("sft")}
    assert len(found) == 2 * 2 * 2 * 2  # levels, roundings, measures, and half widths
    cells = {(line[0], line[1], line[2]): line[8] for line in rounding.tuning().cells}
    for level in ("O2", "O3"):
        mean = found[f"SFT by seed, {level}, rounded nearest: loss from O0's, in BF16 layers"]
        assert cells["SFT", level, "nearest"].startswith(f"{mean:+.2f} (")


def test_llamas_shape_is_compared_where_all_levels_were_measured_together(monkeypatch):
    def row(level, commit, speed, peak, preset="llama2-7b --seq-length 2048 --fp8-min-gain 0"):
        told = {"case": level, "commit": commit, "gpu": "H200", "preset": preset, "micro_batch": "1"}
        return told | {"tokens_s_gpu": speed, "peak_gib": peak}

    rows = [row("O0", "old", "9", "1"), row("O3", "old", "99", "1")]
    monkeypatch.setattr(throughput, "read", lambda file: rows)
    assert list(post.llama_steps()) == []
    rows += [row(level, "new", speed, peak) for level, speed, peak in (("O3", "150", "50"), ("O2", "140", "40"), ("O1", "120", "70"))]
    rows.append(row("O0", "new", "100", "100"))
    found = {finding.quantity: (finding.ours, finding.paper) for finding in post.llama_steps()}
    assert found["O3, LLaMA-7B's shape, micro-batch 1: throughput from O0's"] == (pytest.approx(50), 27)
    assert found["O3, LLaMA-7B's shape, micro-batch 1: peak memory from O0's"] == (pytest.approx(-50), -14)
    assert found["O1, LLaMA-7B's shape, micro-batch 1: throughput from O0's"] == (pytest.approx(20), None)


def test_zero_shot_scores_differ_by_so_many_standard_errors():
    def row(model, task, metric, value, stderr="0.03"):
        return {"model": model, "task": task, "metric": metric, "value": str(value), "stderr": stderr}

    scores = [row("ck-O0", "a", "acc", 0.5), row("ck-O3", "a", "acc", 0.44), row("ck-O0", "b", "acc", 0.3), row("ck-O3", "b", "acc", 0.31)]
    text = [row("ck-O0", "text", "bits_per_byte", 0.8, ""), row("ck-O3", "text", "bits_per_byte", 0.82, "")]
    found = by_name(post.zero_shot([*scores, *text, row("ck-O0", "c", "acc", 0.1), row("smollm2", "a", "acc", 0.9)]))
    assert found["a: O3 less O0"].ours == pytest.approx(-6)
    assert found["b: accuracy at O0"].ours == 30
    assert found[post.LARGEST2].ours == pytest.approx(0.06 / (0.03 * 2**0.5))
    assert found["held-out text: bits per byte, O3 over O0, each read in its own precision"].ours == pytest.approx(1.025)
    assert not any("exported" in name for name in found)
    exported = [row(f"continued-{level}-bf16", "text", "bits_per_byte", bits, "") for level, bits in (("O0", 0.8), ("O3", 0.81))]
    found = by_name(post.zero_shot([*scores, *text, *exported]))
    assert found["held-out text: bits per byte, O3 over O0, both exported to BF16"].ours == pytest.approx(1.0125)
    assert not any(name.startswith("c") for name in found)
    with pytest.raises(ValueError, match="no task has results of both O0 and O3"):
        list(post.zero_shot(text))


def test_rlhf_counts_gradients_with_the_states_as_the_paper_does():
    found = by_name(post.ppo_findings([PPO, PPO | {"recipe": "O3", "weight_mib": "70", "state_mib": "30", "gradient_mib": "10"}]))
    for name, ours, paper in (("weights of all models", -30, -32), ("states and gradients", -60, -62)):
        one = found[f"O3: {name} from O0's"]
        assert (one.ours, one.paper) == (pytest.approx(ours), paper)
    assert found["O0: reward `digits` of the last 10 steps"].ours == 0.5
    with pytest.raises(ValueError, match="the PPO results cover O0"):
        list(post.ppo_findings([PPO]))


def test_rewards_of_rlhf_are_those_of_one_run():
    """An earlier run with another reward is in the rows and the curves: its numbers have its name, and the figure leaves it out."""
    fp8 = {"recipe": "O3"}
    earlier = PPO | {"reward": "arithmetic", "commit": "old", "reward_last": "0.1", "weight_mib": "999", "steps": "1"}
    point = {"run": "ppo", "quantity": "reward", "recipe": "O0", "commit": "new", "gpu": "H200", "step": "1", "value": "0.25"}
    course = [point, point | {"step": "2", "value": "0.5"}]
    course += [line | fp8 for line in course]
    lines = [point | {"commit": "old", "value": "0.1"}, *course, point | {"quantity": "kl"}, point | {"run": "dpo"}]
    rows = [earlier, earlier | fp8, PPO, PPO | fp8 | {"reward_last": "0.75"}]
    found = list(post.ppo_findings(rows, lines))
    curve = [(each.quantity, each.x, each.ours) for each in found if each.x is not None]
    assert curve == [(f"{level}, reward", x, y) for level in ("O0", "O3") for x, y in ((1.0, 0.25), (2.0, 0.5))]
    values = {quantity: finding.ours for quantity, finding in by_name(found).items()}
    assert values["O3: reward `digits` of the last 10 steps"] == 0.75
    assert values["O3: reward `arithmetic` of the last 10 steps"] == 0.1
    assert values["O3: KL from the reference in the last step, reward `digits`"] == 3
    assert values["O3: weights of all models from O0's"] == 0
    with pytest.raises(ValueError, match=r"has 3 rewards of O0 at new, whose run has 2 steps"):
        list(post.ppo_findings(rows, [*lines, point]))
    with pytest.raises(ValueError, match=r"differ in reward 'digits' and 'arithmetic'; steps '2' and '1'; commit 'new' and 'old'"):
        list(post.ppo_findings([*rows, earlier | fp8]))


def test_dpo_at_each_rate_is_compared_with_o0_at_that_rate():
    def row(case, own, bf16, seed="1"):
        return {"case": case, "seed": seed, "own_loss": str(own), "bf16_loss": str(bf16), "commit": "abc1234"}

    start = math.log(2)
    rows = [row("start", "", start), row("O3 --lr 2e-5", 0.7, start - 0.05), row("O0 --lr 2e-5", start - 0.1, start - 0.1),
            row("O3 --lr 5e-6", 0.6, start - 0.01), row("O0 --lr 5e-6", start - 0.04, start - 0.04)]  # fmt: skip
    found = {finding.quantity: finding.ours for finding in post.dpo_rates(rows)}
    fall = "fall of the loss in BF16 layers, over O0's fall"
    assert found[f"DPO at learning rate 2e-05, O3: {fall}"] == pytest.approx(0.5)
    assert found[f"DPO at learning rate 5e-06, O3: {fall}"] == pytest.approx(0.25)
    assert found["DPO at learning rate 2e-05, O3: loss in its own layers"] == 0.7
    assert found["DPO at learning rate 5e-06, O0: loss in BF16 layers"] == pytest.approx(start - 0.04)
    assert len(found) == 10
    assert [name[21:26] for name in found] == ["5e-06"] * 5 + ["2e-05"] * 5
    with pytest.raises(ValueError, match="no DPO result of O0 at learning rate 2e-05 with seed 2"):
        list(post.dpo_rates([*rows, row("O3 --lr 2e-5", 0.7, 0.6, "2")]))


def test_dpo_over_rates_on_file_covers_three_levels_at_three_rates():
    found = {finding.quantity: finding for finding in post.dpo_rates(read(post.RATES))}
    own = {name: finding.ours for name, finding in found.items() if name.endswith("own layers")}
    assert {name.removeprefix("DPO at learning rate ").partition(":")[0] for name in own} == {
        f"{rate}, {level}" for rate in ("1e-06", "5e-06", "2e-05") for level in ("O0", "O2", "O3")
    }
    start = next(float(row["bf16_loss"]) for row in read(post.RATES) if row["case"] == "start")
    assert start == pytest.approx(math.log(2), abs=1e-6)


def test_evaluating_in_fp8_stands_apart_from_training_in_fp8():
    """Before any step O3 reads 1 % above O0: that much of what is left at the end is not of training."""
    base = SFT | {"valid_loss_before": "1.6", "valid_loss_after": "1.45"}
    lines = by_name(post.sft_findings([base, base | {"recipe": "O3", "valid_loss_before": "1.616", "valid_loss_after": "1.479"}]))
    assert lines["O3: held-out loss from O0's before any step"].ours == pytest.approx(1)
    assert lines["O3: held-out loss from O0's, each read in its own precision"].ours == pytest.approx(2)
    assert lines["O0: fall of the held-out loss in training"].ours == pytest.approx(0.15)
    assert lines["O3: fall of the held-out loss in training"].ours == pytest.approx(0.137)
    assert lines[post.GAIN3].ours == pytest.approx(0.137 / 0.15)
    on_file = {finding.quantity: finding for finding in post.table3(KEPT)}
    assert on_file[post.TUNED3].ours == pytest.approx(0.984029 / 0.980953)


def test_the_page_of_rlhf_has_the_rows_that_speak_against_it():
    found = {finding.quantity: finding.ours for finding in post.table4(KEPT)}
    assert found["DPO, O0: loss of the last steps"] < found["DPO, O0: loss of the first step"] < found["DPO, O3: loss of the last steps"]
    assert found["PPO, O3: time of a step"] > 3 * found["PPO, O0: time of a step"]
    counted = "O3, LLaMA-7B counted: states and gradients from O0's with FP32 gradients"
    assert found[counted] == pytest.approx(-62, abs=0.5)
    assert found["O3: states and gradients from O0's"] > found[counted]  # the baseline measured has BF16 gradients
    assert found["O3: reward `digits` of the last 10 steps"] > 0.9 > 0.2 > found["O3: reward `arithmetic` of the last 10 steps"]
    own = "DPO at learning rate 2e-05, {}: loss in its own layers"
    assert found[own.format("O0")] < math.log(2) < min(found[own.format(level)] for level in ("O2", "O3"))


def test_encoders_are_told_over_option_d():
    rows = [ENCODER, ENCODER | {"precision": "collage-plus", "ppl": "9"}, ENCODER | {"precision": "O3", "ppl": "10"}]
    found = by_name(post.encoder_findings([*rows, ENCODER | {"ppl": "4", "phase": "phase2"}]))
    assert found["plus, phase1: perplexity over D's"].ours == pytest.approx(9 / 8)
    assert found["O3, phase1: perplexity over D's"].ours == pytest.approx(10 / 8)
    assert found["d, phase2: perplexity"].ours == 4
    with pytest.raises(ValueError, match="train bf16-d too"):
        list(post.encoder_findings(rows[1:]))


def test_boolq_tells_each_seed():
    row = {"precision": "bf16-d", "seed": "1", "accuracy": "0.62", "majority": "0.6"}
    found = list(post.boolq_findings([row, row | {"precision": "collage-plus", "seed": "2", "accuracy": "0.7"}]))
    assert [(each.quantity, each.ours, each.seed) for each in found] == [
        ("d: accuracy on BoolQ", 62, 1), ("plus: accuracy on BoolQ", 70, 2), ("majority answer", 60, None)
    ]  # fmt: skip


def test_rows_on_file_are_asked_for_by_name():
    for name in ("fp8lm-table2", "fp8lm-table3", "fp8lm-table4", "collage-table3", "collage-table4"):
        lacking = ENTRIES[name].sizes["kept"].lacking()
        assert bool(lacking) != all((ROOT / file).is_file() for file in ENTRIES[name].sizes["kept"].files)


def test_a_continued_model_is_compared_in_its_own_layers_and_in_bf16():
    def row(case, seed, start, own, bf16):
        return {"case": case, "seed": seed, "start": start, "own": own, "bf16": bf16, "commit": "abc1234"}

    rows = [
        row("O0", "1", "3", "2", "2"),
        row("O0", "2", "4", "2.5", "2.5"),
        row("O2", "1", "3.03", "2.02", "2.01"),
        row("O2", "2", "4.04", "2.525", "2.5"),
    ]
    found = {finding.quantity: finding.ours for finding in post.continued(rows)}
    told = "O2, continued: held-out loss from O0's "
    assert found[told + "before training"] == pytest.approx(1.0)
    assert found[told + "after it, each in its own layers"] == pytest.approx(1.0)
    assert found[told + "after it, both in BF16 layers"] == pytest.approx(0.25)
    assert found[told + "after it, both in BF16 layers: half width of the 95 % interval"] == pytest.approx(12.7062 * 0.25)
    assert len(found) == 6
