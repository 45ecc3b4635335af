"""Findings of fine-tuned models, against rows by hand: by seed, of the newest commit, and refused without O0."""

import math

import pytest

from megatron.lm.evaluation.paired_difference import Interval
from tools.docs import rounding
from tools.docs.evidence import read
from tools.reproduce import fine_tuning, throughput

SFT = {"model": "big", "parameters": "7000", "recipe": "O0", "seed": "1", "tokens_per_s": "100", "peak_bytes": "20",
       "valid_loss_after": "", "commit": "0123456", "gpu": "H200"}  # fmt: skip
PPO = {"recipe": "O0", "seed": "1", "weight_mib": "100", "state_mib": "80", "gradient_mib": "20", "reward_first": "0.25",
       "reward_last": "0.5", "reward": "digits", "kl_last": "3", "steps": "2", "commit": "new", "gpu": "H200"}  # fmt: skip
T2 = 12.7062  # Student's t of two pairs at 95 %


def by_name(found):
    return {finding.quantity: finding for finding in found if finding.x is None}


def test_fine_tuning_is_told_from_o0_of_the_same_model_and_the_paper_stands_beside_the_largest():
    small = {"model": "small", "parameters": "70", "valid_loss_after": "2.0"}
    rows = [SFT, SFT | small, SFT | small | {"recipe": "O3", "tokens_per_s": "90", "valid_loss_after": "2.1"},
            SFT | {"recipe": "O3", "tokens_per_s": "130", "peak_bytes": "16"},
            SFT | {"model": "huge", "parameters": "9000", "recipe": "O3"}]  # fmt: skip
    found = list(fine_tuning.sft_findings(rows))
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
    with pytest.raises(ValueError, match="no fine-tuning result at O0"):
        list(fine_tuning.sft_findings([SFT | {"recipe": "O3"}]))


def test_fine_tuning_with_several_seeds_is_paired_by_seed():
    runs = [SFT | {"seed": seed, "recipe": level, "tokens_per_s": speed, "valid_loss_before": before, "valid_loss_after": after}
            for level, seed, speed, before, after in (("O0", "1", "100", "2.0", "1.0"), ("O0", "2", "200", "2.0", "1.5"),
                                                      ("O3", "1", "60", "2.02", "1.02"), ("O3", "2", "80", "2.02", "1.5"))]  # fmt: skip
    found = by_name(fine_tuning.sft_findings(runs))
    speed = "O3: throughput from O0's at 0123456"
    assert (found[speed].ours, found[speed].paper, found[speed].seed) == (pytest.approx(100 * (70 / 150 - 1)), 27, None)
    slowest, fastest = (found[f"{speed}: {which} run"] for which in ("slowest", "fastest"))
    assert (slowest.ours, fastest.ours, slowest.paper) == (pytest.approx(-60), pytest.approx(100 * (80 / 150 - 1)), None)
    own = "O3: held-out loss from O0's, each read in its own precision"
    assert found[own].ours == pytest.approx(1)
    assert found[f"{own}: {fine_tuning.HALF_WIDTH}"].ours == pytest.approx(T2 * 1)
    assert found["O3: held-out loss from O0's before any step"].ours == pytest.approx(1)
    assert found["O0: fall of the held-out loss in training"].ours == pytest.approx(0.75)
    assert found["O3: fall of the held-out loss in training"].ours == pytest.approx(0.76)
    assert found[fine_tuning.GAIN3].ours == pytest.approx((1 + 0.52 / 0.5) / 2)
    assert found["O3: peak memory from O0's"].ours == 0


def test_one_seed_has_no_interval_and_its_seed():
    found = by_name(fine_tuning.sft_findings([SFT, SFT | {"recipe": "O3"}]))
    assert not any("half width" in name or "slowest" in name for name in found)
    assert {finding.seed for finding in found.values()} == {1}


def test_speeds_are_medians_of_the_seeds():
    """As on the results page: one run on a busy host does not move them."""
    speeds = {"O0": ("100", "100", "40"), "O3": ("50", "10", "60")}
    runs = [
        SFT | {"seed": str(seed), "recipe": level, "tokens_per_s": speed} for level in speeds for seed, speed in enumerate(speeds[level])
    ]
    found = by_name(fine_tuning.sft_findings(runs))
    assert found["O3: throughput from O0's at 0123456"].ours == pytest.approx(-50)


def test_a_run_of_lora_is_no_run_of_all_weights():
    lora = {"lora_rank": "8", "commit": "newer"}
    rows = [SFT, SFT | {"recipe": "O3", "tokens_per_s": "130"}, SFT | lora, SFT | {"recipe": "O3", "tokens_per_s": "1"} | lora]
    assert by_name(fine_tuning.sft_findings(rows))["O3: throughput from O0's at 0123456"].ours == pytest.approx(30)


def test_levels_of_other_options_are_refused():
    for key in ("dtype", "steps", "global_batch_size", "seq_length"):
        with pytest.raises(ValueError, match=f"results of big at 0123456 of O0 and O3 with seed 1 differ in {key} '8' and '9': run both"):
            list(fine_tuning.sft_findings([SFT | {key: "8"}, SFT | {"recipe": "O3", key: "9"}]))


def test_training_losses_are_those_of_the_newest_commit():
    """An earlier run's curve of the same level is left out; two seeds' curves of one level are refused."""
    rows = [SFT | {"steps": "2", "recipe": level} for level in ("O0", "O3")]
    line = {"run": "sft", "quantity": "loss", "recipe": "O0", "commit": "0123456", "gpu": "H200", "step": "1", "value": "2.5"}
    course = [
        line | {"recipe": level, "step": step, "value": value} for level in ("O3", "O0") for step, value in (("1", "2.5"), ("2", "1.5"))
    ]
    others = [line | {"commit": "old"}, line | {"gpu": "H100"}, line | {"run": "ppo"}, line | {"quantity": "valid_loss"}]
    found = [(each.quantity, each.x, each.ours) for each in fine_tuning.sft_findings(rows, [*others, *course]) if each.x is not None]
    assert found == [(f"{level}, training loss", x, y) for level in ("O0", "O3") for x, y in ((1.0, 2.5), (2.0, 1.5))]
    with pytest.raises(ValueError, match=r"has 3 values of sft's loss of O0 at 0123456, whose run has 2 steps: keep the curve of one seed"):
        list(fine_tuning.sft_findings(rows, [*others, *course, line]))


def test_a_seed_without_its_o0_is_refused_by_name():
    message = "no fine-tuning result of big at 0123456 of O0 with seed 2, with which O3 was run: run O0 with it too"
    with pytest.raises(ValueError, match=message):
        list(fine_tuning.sft_findings([SFT, SFT | {"recipe": "O3"}, SFT | {"recipe": "O3", "seed": "2"}]))


def test_of_two_commits_the_newest_counts():
    """Its speeds are of another card: comparing across commits would compare cards."""
    old = [SFT | {"recipe": level, "seed": seed, "tokens_per_s": "1", "commit": "old"} for level in ("O0", "O1", "O3") for seed in "12"]
    found = by_name(fine_tuning.sft_findings([*old, SFT, SFT | {"recipe": "O3", "tokens_per_s": "130"}]))
    assert [name for name in found if "throughput" in name] == ["O3: throughput from O0's at 0123456"]
    assert found["O3: throughput from O0's at 0123456"].ours == pytest.approx(30)
    with pytest.raises(ValueError, match="at newer of O0 with seed 1"):
        list(fine_tuning.sft_findings([*old, SFT | {"recipe": "O3", "commit": "newer"}]))


def test_tuning_by_seed_is_that_of_its_table():
    """Of the recorded rows, whose table on the results page has the same intervals."""
    found = {finding.quantity: finding.ours for finding in fine_tuning.tuned("sft")}
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
    assert list(fine_tuning.llama_steps()) == []
    rows += [row(level, "new", speed, peak) for level, speed, peak in (("O3", "150", "50"), ("O2", "140", "40"), ("O1", "120", "70"))]
    rows.append(row("O0", "new", "100", "100"))
    found = {finding.quantity: (finding.ours, finding.paper) for finding in fine_tuning.llama_steps()}
    assert found["O3, LLaMA-7B's shape, micro-batch 1: throughput from O0's"] == (pytest.approx(50), 27)
    assert found["O3, LLaMA-7B's shape, micro-batch 1: peak memory from O0's"] == (pytest.approx(-50), -14)
    assert found["O1, LLaMA-7B's shape, micro-batch 1: throughput from O0's"] == (pytest.approx(20), None)


def test_rlhf_counts_gradients_with_the_states_as_the_paper_does():
    found = by_name(fine_tuning.ppo_findings([PPO, PPO | {"recipe": "O3", "weight_mib": "70", "state_mib": "30", "gradient_mib": "10"}]))
    for name, ours, paper in (("weights of all models", -30, -32), ("states and gradients", -60, -62)):
        one = found[f"O3: {name} from O0's"]
        assert (one.ours, one.paper, one.seed) == (pytest.approx(ours), paper, 1)
    assert found["O0: reward `digits` of the last 10 steps"].ours == 0.5
    assert not any("half width" in name or "less O0's" in name for name in found)
    for rows, message in (([PPO], "`digits` at new cover O0: run"), ([], "no PPO result")):
        with pytest.raises(ValueError, match=message):
            list(fine_tuning.ppo_findings(rows))


def test_rewards_of_rlhf_are_those_of_the_newest_commit():
    """An earlier run with another reward is in the rows and the curves: its numbers have its name, and the figure leaves it out. An earlier
    run with the same reward is left out everywhere."""
    fp8 = {"recipe": "O3"}
    earlier = PPO | {"reward": "arithmetic", "commit": "old", "reward_last": "0.1", "weight_mib": "999", "steps": "1"}
    same_reward = PPO | {"commit": "old", "reward_last": "0.9", "seed": "7"}
    point = {"run": "ppo", "quantity": "reward", "recipe": "O0", "commit": "new", "gpu": "H200", "step": "1", "value": "0.25"}
    course = [point, point | {"step": "2", "value": "0.5"}]
    course += [line | fp8 for line in course]
    lines = [point | {"commit": "old", "value": "0.1"}, *course, point | {"quantity": "kl"}, point | {"run": "dpo"}]
    rows = [earlier, earlier | fp8, same_reward, same_reward | fp8, PPO, PPO | fp8 | {"reward_last": "0.75"}]
    found = list(fine_tuning.ppo_findings(rows, lines))
    curve = [(each.quantity, each.x, each.ours) for each in found if each.x is not None]
    assert curve == [(f"{level}, reward", x, y) for level in ("O0", "O3") for x, y in ((1.0, 0.25), (2.0, 0.5))]
    values = {quantity: finding.ours for quantity, finding in by_name(found).items()}
    assert values["O3: reward `digits` of the last 10 steps"] == 0.75
    assert values["O3: reward `arithmetic` of the last 10 steps"] == 0.1
    assert values["O3: KL from the reference in the last step, reward `digits`"] == 3
    assert values["O3: weights of all models from O0's"] == 0
    with pytest.raises(ValueError, match=r"has 3 values of ppo's reward of O0 at new, whose run has 2 steps"):
        list(fine_tuning.ppo_findings(rows, [*lines, point]))
    with pytest.raises(ValueError, match="`digits` at newer cover O3: run"):
        list(fine_tuning.ppo_findings([*rows, PPO | fp8 | {"commit": "newer"}]))
    with pytest.raises(ValueError, match="of O0 and O3 with seed 1 differ in steps '2' and '1': run both"):
        list(fine_tuning.ppo_findings([*rows, PPO | fp8 | {"steps": "1"}]))


def test_rewards_of_several_seeds_are_means_with_their_intervals():
    rows = [PPO | {"seed": seed, "recipe": level, "reward_last": last, "kl_last": "4" if seed == "2" else "2"}
            for seed, level, last in (("1", "O0", "0.4"), ("2", "O0", "0.6"), ("1", "O3", "0.5"), ("2", "O3", "0.9"))]  # fmt: skip
    found = by_name(fine_tuning.ppo_findings(rows))
    last = "O0: reward `digits` of the last 10 steps"
    assert (found[last].ours, found[last].seed) == (pytest.approx(0.5), None)
    assert found[f"{last}: {fine_tuning.HALF_WIDTH}"].ours == pytest.approx(T2 * 0.1)
    above = "O3: reward `digits` of the last 10 steps, less O0's"
    assert found[above].ours == pytest.approx(0.2)
    assert found[f"{above}: {fine_tuning.HALF_WIDTH}"].ours == pytest.approx(T2 * 0.1)
    assert found["O3: KL from the reference in the last step, reward `digits`"].ours == 3
    with pytest.raises(ValueError, match="no PPO result with reward `digits` at new of O0 with seed 2, with which O3 was run"):
        list(fine_tuning.ppo_findings([row for row in rows if (row["seed"], row["recipe"]) != ("2", "O0")]))
    with pytest.raises(ValueError, match="have seed 2 at O0 and not at O3"):
        list(fine_tuning.ppo_findings([row for row in rows if (row["seed"], row["recipe"]) != ("2", "O3")]))


def test_dpo_at_each_rate_is_compared_with_o0_at_that_rate():
    def row(case, own, bf16, seed="1"):
        return {"case": case, "seed": seed, "own_loss": str(own), "bf16_loss": str(bf16), "commit": "abc1234"}

    start = math.log(2)
    rows = [row("start", "", start), row("O3 --lr 2e-5", 0.7, start - 0.05), row("O0 --lr 2e-5", start - 0.1, start - 0.1),
            row("O3 --lr 5e-6", 0.6, start - 0.01), row("O0 --lr 5e-6", start - 0.04, start - 0.04)]  # fmt: skip
    found = {finding.quantity: finding.ours for finding in fine_tuning.dpo_rates(rows)}
    fall = "fall of the loss in BF16 layers, over O0's fall"
    assert found[f"DPO at learning rate 2e-05, O3: {fall}"] == pytest.approx(0.5)
    assert found[f"DPO at learning rate 5e-06, O3: {fall}"] == pytest.approx(0.25)
    assert found["DPO at learning rate 2e-05, O3: loss in its own layers"] == 0.7
    assert found["DPO at learning rate 5e-06, O0: loss in BF16 layers"] == pytest.approx(start - 0.04)
    assert found["DPO at learning rate 5e-06, O3: loss from O0's, in its own layers"] == pytest.approx(100 * (0.6 / (start - 0.04) - 1))
    assert found["DPO at learning rate 2e-05, O0: fall of the loss"] == pytest.approx(0.1)
    assert [name[21:26] for name in found] == ["5e-06"] * 8 + ["2e-05"] * 8
    with pytest.raises(ValueError, match="no DPO result at learning rate 2e-05 of O0 with seed 2, with which O3 was run"):
        list(fine_tuning.dpo_rates([*rows, row("O3 --lr 2e-5", 0.7, 0.6, "2")]))


def test_dpo_of_several_seeds_is_paired_by_seed():
    """A fall of O0 whose interval includes zero is no denominator, and shares are quotients of sums."""

    def row(level, seed, own, fall):
        return {"case": f"{level} --lr 1e-6", "seed": seed, "own_loss": str(own), "bf16_loss": str(math.log(2) - fall), "commit": seed}

    def rows(*falls, shares=(0.5, 0.5)):
        base = [row("O0", str(seed), 0.5 + seed, fall) for seed, fall in enumerate(falls)]
        return base + [row("O2", str(seed), 1.1 * (0.5 + seed), share * falls[seed]) for seed, share in enumerate(shares)]

    def shown(*falls, shares=(0.5, 0.5)):
        return by_name(fine_tuning.dpo_rates(rows(*falls, shares=shares)))

    found = shown(0.1, 0.1001)
    own = "DPO at learning rate 1e-06, O2: loss from O0's, in its own layers"
    assert (found[own].ours, found[own].seed) == (pytest.approx(10), None)
    assert found[f"{own}: {fine_tuning.HALF_WIDTH}"].ours == pytest.approx(0, abs=1e-9)
    share = "DPO at learning rate 1e-06, O2: fall of the loss in BF16 layers, over O0's fall"
    assert found[share].ours == pytest.approx(0.5)
    assert share not in shown(0.1, -0.05)
    assert shown(0.1, 0.11, shares=(0.2, 0.9))[share].ours == pytest.approx((0.02 + 0.099) / 0.21)  # the mean of the shares is 0.55
    with pytest.raises(ValueError, match="of O0 and O2 with seed 1 differ in commit '1' and 'other': run both levels"):
        list(fine_tuning.dpo_rates([*rows(0.1, 0.1)[:-1], rows(0.1, 0.1)[-1] | {"commit": "other"}]))


def test_dpo_gives_losses_seed_by_seed_with_their_commits():
    """Seeds ran at different commits, and the sources of an entry are those of its findings."""
    rows = [{"case": f"{level} --lr 1e-6", "seed": seed, "own_loss": own, "bf16_loss": "0.6", "commit": commit}
            for level in ("O0", "O2") for seed, own, commit in (("7", "0.5", "old"), ("8", "0.7", "new"))]  # fmt: skip
    found = [each for each in fine_tuning.dpo_rates(rows) if each.quantity == "DPO at learning rate 1e-06, O2: loss in its own layers"]
    assert [(each.ours, each.seed, each.where["commit"]) for each in found] == [(0.5, 7, "old"), (0.7, 8, "new")]


def test_a_fall_that_equals_its_half_width_is_no_denominator(monkeypatch):
    """The interval includes zero then."""
    rows = [{"case": f"{level} --lr 1e-6", "seed": seed, "own_loss": "0.6", "bf16_loss": "0.6", "commit": "one"}
            for level in ("O0", "O2") for seed in "78"]  # fmt: skip
    share = "DPO at learning rate 1e-06, O2: fall of the loss in BF16 layers, over O0's fall"
    for half_width, given in ((0.25, False), (0.2499, True)):
        monkeypatch.setattr(fine_tuning, "interval", lambda values, width=half_width: Interval(mean=0.25, half_width=width))
        assert (share in by_name(fine_tuning.dpo_rates(rows))) is given


def test_dpo_over_the_recorded_rates_covers_three_levels_at_three_rates():
    found = {finding.quantity: finding for finding in fine_tuning.dpo_rates(read(fine_tuning.RATES))}
    own = {name: finding.ours for name, finding in found.items() if name.endswith("own layers")}
    assert {name.removeprefix("DPO at learning rate ").partition(":")[0] for name in own} == {
        f"{rate}, {level}" for rate in ("1e-06", "5e-06", "2e-05") for level in ("O0", "O2", "O3")
    }
    start = next(float(row["bf16_loss"]) for row in read(fine_tuning.RATES) if row["case"] == "start")
    assert start == pytest.approx(math.log(2), abs=1e-6)


def test_evaluating_in_fp8_stands_apart_from_training_in_fp8():
    """Before any step O3 reads 1 % above O0: that much of what is left at the end is not of training."""
    base = SFT | {"valid_loss_before": "1.6", "valid_loss_after": "1.45"}
    lines = by_name(fine_tuning.sft_findings([base, base | {"recipe": "O3", "valid_loss_before": "1.616", "valid_loss_after": "1.479"}]))
    assert lines["O3: held-out loss from O0's before any step"].ours == pytest.approx(1)
    assert lines["O3: held-out loss from O0's, each read in its own precision"].ours == pytest.approx(2)
    assert lines["O0: fall of the held-out loss in training"].ours == pytest.approx(0.15)
    assert lines["O3: fall of the held-out loss in training"].ours == pytest.approx(0.137)
    assert lines[fine_tuning.GAIN3].ours == pytest.approx(0.137 / 0.15)
