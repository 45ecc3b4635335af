"""What the words of FP8-LM's entries in verdicts.toml say in numbers, with the condition under which each is true."""

import math
import re
from collections.abc import Callable

import pytest

from helpers.reproduced import (
    TP2,
    TP2_DP2,
    above,
    before_updates,
    between_trees,
    both,
    by_rounding,
    by_seed,
    differences,
    dpo_rates,
    earlier_ppo,
    figure7,
    from_paper,
    gains7,
    less_of_both,
    llama_shape,
    margins,
    orders,
    ranks,
    real_sums,
    results,
    rewards,
    seeds_of,
    share7,
    step7,
    today,
    tuned3,
)
from megatron.lm.evaluation.paired_difference import HOLDS
from msamp.numerics.recipe import O2, O3
from msamp.numerics.stochastic_rounding import ROUNDINGS
from tools.docs import post
from tools.docs.evidence import read
from tools.reproduce import gradients, grids
from tools.reproduce.fine_tuning import GAIN3, HALF_WIDTH, LEVELS, RATES
from tools.reproduce.registry import ENTRIES

SAID: list[tuple[str, str, Callable[[], bool]]] = [
    ("fp8lm-figure4", "At 1.3B O3 ends a little below BF16 with each of three seeds",
     lambda: (d := above("fp8lm-figure4", "bf16 at 1.3B: validation loss", "O3 at 1.3B: validation loss")) and len(d) == 3 and max(d) < 0),
    ("fp8lm-figure7", "from four ranks on the paper's rule for mu has less of both",
     lambda: ranks(less_of_both) == [4, 8, 16, 32, 64, 128]),
    ("fp8lm-figure7", "with a fifteenth of its underflow",
     lambda: round(figure7()["DP 128, pre: underflow, sent"] / figure7()["DP 128, auto-halve: underflow, sent"]) == 15),
    ("fp8lm-figure7", "keep most of the SNR of pre-scaling and of our rule, while post-scaling and the paper's rule stay low",
     lambda: len(orders("small")) == 2 and all(min(snr["pre"], snr["auto-halve"]) > 25 > 12 > max(snr["post"], snr["auto-paper"])
                                               for snr in orders("small"))),
    ("fp8lm-figure7", "Neither rule gives a much better SNR than the better of the two", lambda: max(gains7()) < 0.5),
    ("fp8lm-figure7", "the exchange that adds in FP32 keeps it", lambda: figure7()["DP 128, fp32-sum: SNR"] > 30),
    ("fp8lm-figure7", "over 128 ranks in a chain every SNR is within a decibel of that at 125M",
     lambda: all(abs(figure7("1.3B")[name] - figure7()[name]) < 1
                 for name in figure7("1.3B") if re.fullmatch("DP 128, [a-z0-9-]+: SNR", name))),
    ("fp8lm-figure7", "from eight ranks on the paper's rule has less of both", lambda: ranks(less_of_both, "1.3B") == [8, 32, 128]),
    ("fp8lm-figure7", "our rule has the SNR of pre-scaling with less than a fifteenth of its underflow",
     lambda: (large := figure7("1.3B"))["DP 128, pre: underflow, sent"] > 15 * large["DP 128, auto-halve: underflow, sent"]
     and abs(large["DP 128, pre: SNR"] - large["DP 128, auto-halve: SNR"]) < 0.1),
    ("fp8lm-figure7", "Pre-scaling underflows about three times as much there",
     lambda: round(figure7("1.3B")["DP 128, pre: underflow, sent"] / figure7()["DP 128, pre: underflow, sent"]) == 3),
    ("fp8lm-figure7", "the same two keep most of it and the same two stay low",
     lambda: len(orders("full", "1.3B")) == 2 and all(min(snr["pre"], snr["auto-halve"]) > 26 > 14 > max(snr["post"], snr["auto-paper"])
                                                      for snr in orders("full", "1.3B"))),
    ("fp8lm-figure7", "up to a third of a decibel less at 1.3B",
     lambda: 0.25 < max(snr["pre"] - snr["auto-halve"] for snr in orders("full", "1.3B")) < 1 / 3),
    ("fp8lm-figure7-nccl", "equals the simulated sum in every bit",
     lambda: {value for name, value in results("fp8lm-figure7-nccl").items() if " 2 ranks" in name and "equal to" in name} == {100.0}),
    ("fp8lm-figure7-nccl", "In E4M3 pre-scaling underflows more than post-scaling",
     lambda: (lost := real_sums("underflow, sent")[0])["pre"] > lost["post"] > 0),
    ("fp8lm-figure7-nccl", "in both formats post-scaling overflows more than pre-scaling, which never does",
     lambda: all(full["pre"] == 0 < full["post"] for full in real_sums("overflow, reduced"))),
    ("fp8lm-figure7-nccl", "within a fifth of a decibel over two cards and within a third over four, and auto-scaling no more than pre-",
     lambda: all(max(snr.values()) - min(snr.values()) < limit and max(snr["auto-paper"], snr["auto-halve"]) <= snr["pre"] + 0.01
                 for ranks, limit in ((2, 0.2), (4, 1 / 3)) for snr in real_sums("SNR", ranks))),
    ("fp8lm-figure7-nccl", "every run of 512 elements equals a chain in every bit",
     lambda: {value for name, value in results("fp8lm-figure7-nccl").items() if "in some order" in name} == {100.0}),
    ("fp8lm-figure7-nccl", "each of a ring's four starts has a quarter of the runs",
     lambda: all(sorted(part.split()[1] for part in row["chains"].split("; "))[-4:] == ["0.2500"] * 4
                 for row in read(gradients.REAL) if row["ranks"] == "4" and row["strategy"] != "fp32-sum")),
    ("fp8lm-figure7-nccl", "A chain from the first rank, or a tree, has two thirds of the elements",
     lambda: all(66 < value < 70 for name, value in results("fp8lm-figure7-nccl").items()
                 if " 4 ranks" in name and ("simulated chain" in name or "simulated tree" in name))),
    ("fp8lm-figure7-nccl", "Over four cards the sum in FP32 has two and a half decibels more than any FP8 sum",
     lambda: all(2.5 < results("fp8lm-figure7-nccl")[f"gpt-12x768, 4 ranks, all-reduce, {fmt}: fp32-sum, SNR"] - max(snr.values()) < 2.6
                 for fmt, snr in zip(("fp8-e4m3", "fp8-e5m2"), real_sums("SNR", 4), strict=True))),
    ("fp8lm-figure1", "at each number of cards the largest GPT in FP8 is larger than in BF16",
     lambda: all(size > results("fp8lm-figure1")[name.replace("FP8", "BF16")] for name, size in results("fp8lm-figure1").items()
                 if name.startswith("largest") and name.endswith("FP8"))),
    ("fp8lm-figure1", "BF16 does not fit 175B there at all",
     lambda: min(held for name, held in results("fp8lm-figure1").items() if name.endswith("BF16: fullest")) > 80),
    ("fp8lm-two-ranks", "Over two ranks O3 ends at BF16's loss, whether the payloads are summed in FP32 or by NCCL in E4M3",
     lambda: {difference.verdict() for *_, difference in differences("fp8lm-two-ranks")[:2]} == {HOLDS}),
    ("fp8lm-two-ranks", "with six seeds each interval is within an eighth of a percent",
     lambda: all(len(paired.seeds) == 6 and max(map(abs, paired.relative.ends)) < 1 / 800
                 for *_, paired in differences("fp8lm-two-ranks"))),
    ("fp8lm-figure4-nearest", "over six seeds the interval of the paired difference excludes a loss or gain of 0.6 %",
     lambda: [(len(paired.seeds), paired.verdict()) for *_, paired in differences("fp8lm-figure4-nearest")] == [(6, HOLDS)]),
    ("fp8lm-figure4", "over twelve seeds the interval of the paired difference excludes a loss or gain of 0.6 %",
     lambda: [(len(difference.seeds), difference.verdict()) for _, other, difference in differences("fp8lm-figure4")
              if other.startswith("O3 at 125M:")] == [(12, HOLDS)]),
    ("fp8lm-figure4", "The three seeds of all levels are too few to say the same",
     lambda: all(difference.verdict() != HOLDS for _, other, difference in differences("fp8lm-figure4") if "all levels" in other)),
    ("fp8lm-figure7-nccl", "each of a ring's four starts has a quarter of the runs",
     lambda: all(sorted(float(order.split()[1]) for order in row["chains"].split("; "))[-5:] == pytest.approx([0, *[1 / 4] * 4], abs=0.01)
                 for row in read("tools/reproduce/results/fig7/fig7_nccl.csv") if row["ranks"] == "4" and row["strategy"] != "fp32-sum")),
    ("fp8lm-figure7-nccl", "A chain from the first rank, or a tree, has two thirds of the elements",
     lambda: {round(3 * value / 100) for name, value in results("fp8lm-figure7-nccl").items()
              if " 4 ranks" in name and re.search("equal to (the simulated chain|a simulated tree)", name)} == {2}),
    ("fp8lm-figure4-nearest", "over six seeds the interval of the paired difference excludes a loss or gain of 0.6 %",
     lambda: [(len(paired.seeds), paired.verdict()) for *_, paired in differences("fp8lm-figure4-nearest")] == [(6, HOLDS)]),
    ("fp8lm-figure9", "most gradients are lost below E4M3's range; scaled tensor by tensor nearly all are normal numbers",
     lambda: min(results("fp8lm-figure9")[name] for name in ("before scaling: lost in E4M3", "after scaling: normal in E4M3")) > 95),
    ("fp8lm-table2", "scores alike on all tasks, within errors", lambda: results("fp8lm-table2")[ENTRIES["fp8lm-table2"].headline] < 1),
    ("fp8lm-table3", "by almost four percent in the layers that were trained and by less than three exported to BF16",
     lambda: all(3.5 < mean < 4 and half_width < mean for mean, half_width in by_rounding("SFT", "nearest", "its own layers"))
     and all(2 < mean < 3 and half_width < mean for mean, half_width in by_rounding("SFT", "nearest", "BF16 layers"))),
    ("fp8lm-table3", "they end below O0 in the layers that were trained, and two percent above it exported to BF16",
     lambda: all(mean + half_width < 0 for mean, half_width in by_rounding("SFT", "stochastic", "its own layers"))
     and all(round(mean) == 2 and half_width < 1 for mean, half_width in by_rounding("SFT", "stochastic", "BF16 layers"))),
    ("fp8lm-table4", "take less memory at O3, by more than in the paper",
     lambda: max(ours - paper for ours, paper in both("fp8lm-table4", "^O3: weights")) < 0),
    ("fp8lm-table4", "O2 passes it from either",
     lambda: max(value for name, value in results("fp8lm-table4").items() if name.startswith("O2") and "states and" in name) < -62),
    ("fp8lm-table3", "by two thirds at O3, more than twice the paper's gain, by more than half at O2, and by more than two fifths at O1",
     lambda: (gain := llama_shape("throughput")) and round(gain["O3"] / 100 * 3, 1) == 2 and gain["O3"] > 2 * 27 and gain["O2"] > 50
     and gain["O1"] > 40),
    ("fp8lm-table3", "three fifths less at O3, almost two thirds at O2, and more than a third at O1",
     lambda: (less := llama_shape("peak memory")) and round(less["O3"] / 100 * 5, 1) == -3 and -200 / 3 < less["O2"] < -64
     and less["O1"] < -100 / 3 and max(less.values()) < 2 * -14),
    ("fp8lm-table3", "SmolLM2 was fine-tuned at two learning rates with three seeds each",
     lambda: set(seeds_of("rounding/tuning")) == {"1234", "1235", "1236"}
     and {level: len(runs) for level, runs in today(post.SFT, "model", "smollm2").items()} == dict.fromkeys(("O0", *LEVELS), 3)),
    ("fp8lm-table3", "runs at about half of O0's speed",
     lambda: all(-56 < change < -44 for name, change in results("fp8lm-table3").items()
                 if re.fullmatch("O[123]: throughput from O0's at [0-9a-f]+", name))),
    ("fp8lm-table3", "falls by about half as much as with FP32 weights, and by less than half as much as at O2",
     lambda: (times := {(line[0], line[1]): float(line[4].split()[0]) for line in post.starts().cells})
     and 1.8 < times["`O0`", "FP32"] < 2.2 < times["`O2`", "BF16"]),
    ("fp8lm-table3", "runs of one FP8 level differ in speed by up to a seventh",
     lambda: round(1 / max(1 - min(speeds) / max(speeds) for level in LEVELS if (
         speeds := [float(run["tokens_per_s"]) for run in today(post.SFT, "model", "smollm2")[level].values()]))) == 7),
    ("fp8lm-table3", "takes less memory, by four to ten percent: less than in the paper",
     lambda: {round(-results("fp8lm-table3")[f"{level}: peak memory from O0's"]) for level in LEVELS} == {4, 9, 10}),
    ("fp8lm-table3", "one percent higher in FP8 layers than in BF16 layers",
     lambda: {round(results("fp8lm-table3")[f"{level}: held-out loss from O0's before any step"], 1) for level in LEVELS} == {1.1}),
    ("fp8lm-table3", "is above O0's by less than one percent at every level, and all three intervals exclude equal losses",
     lambda: all(half_width < mean < 1 for mean, half_width in (tuned3(level, "held-out loss .* own precision") for level in LEVELS))),
    ("fp8lm-table3", "At O2 and O3 training made it smaller: the loss falls by three to four percent more than at O0, and both",
     lambda: (fall := [tuned3(level, "fall of .* over O0's fall") for level in LEVELS]) and results("fp8lm-table3")[GAIN3] == fall[-1][0]
     and {round(100 * mean) for mean, _ in fall[1:]} == {103, 104} and min(mean - half_width for mean, half_width in fall[1:]) > 1
     and all(sum(tuned3(level, "held-out loss .* own precision")) < results("fp8lm-table3")[
         f"{level}: held-out loss from O0's before any step"] for level in ("O2", "O3"))),
    ("fp8lm-table3", "At O1 the mean fall is as large, but its interval includes equal falls",
     lambda: (fall := [tuned3(level, "fall of .* over O0's fall") for level in LEVELS]) and fall[0][0] >= max(fall[1:])[0]
     and fall[0][0] - fall[0][1] < 1),
    ("fp8lm-table3", "The training loss of the last step is three to four percent below O0's at every level",
     lambda: all(-4 < mean < -3 and half_width < 1
                 for mean, half_width in (tuned3(level, "training loss .* from O0's") for level in LEVELS))),
    ("fp8lm-table4", "In an earlier tree, at the middle rate with three seeds, both ended three to five percent above O0, read in BF16",
     lambda: {round(mean) for rounding in ROUNDINGS for mean, _ in by_rounding("DPO", rounding, "BF16 layers")} == {3, 4, 5}),
    ("fp8lm-table4", "there O2's interval with stochastic rounding excludes zero, and the other three end near it; those in the layers",
     lambda: (inside := [mean - half_width for rounding in ("stochastic", "nearest")
                         for mean, half_width in by_rounding("DPO", rounding, "BF16 layers")])
     and inside[0] > 1 > max(map(abs, inside[1:])) and len(inside) == 4
     and all(wide[1] > narrow[1] for rounding in ROUNDINGS for wide, narrow in zip(
         by_rounding("DPO", rounding, "its own layers"), by_rounding("DPO", rounding, "BF16 layers"), strict=True))),
    ("fp8lm-table4", "with all three seeds: at O0 from less than a tenth in the first ten steps to four fifths in the last",
     lambda: {level: len(runs) for level, runs in today(post.PPO, "reward", "digits").items()} == {"O0": 3, "O3": 3}
     and all(float(run["reward_first"]) < 0.1 < 0.79 < float(run["reward_last"]) < 0.82
             for run in today(post.PPO, "reward", "digits")["O0"].values())),
    ("fp8lm-table4", "at O3 from more than two fifths to more than nine tenths",
     lambda: all(0.4 < float(run["reward_first"]) < 0.5 < 0.9 < float(run["reward_last"])
                 for run in today(post.PPO, "reward", "digits")["O3"].values())),
    ("fp8lm-table4", "O3 is above O0 in the first and in the last ten, and both intervals exclude zero",
     lambda: all(results("fp8lm-table4")[name] > results("fp8lm-table4")[f"{name}: {HALF_WIDTH}"]
                 for name in (f"O3: reward `digits` of the {steps} 10 steps, less O0's" for steps in ("first", "last")))),
    ("fp8lm-table4", "Over three learning rates with three seeds, rounded stochastically and read in BF16, DPO lowers the mean loss",
     lambda: len(dpo_rates("loss in BF16 layers")) == 9 and max(dpo_rates("loss in BF16 layers").values()) < math.log(2)
     and set(seeds_of("dpo_rates/tuning")) == {"1234", "1235", "1236"}
     and O2.states.master_rounding == O3.states.master_rounding == "stochastic"),
    ("fp8lm-table4", "one of the seeds ran in an earlier session than the others, at all levels",
     lambda: len(commits := {(row["seed"], row["commit"]) for row in read(RATES)}) == 3 and len({commit for _, commit in commits}) == 2),
    ("fp8lm-table4", "the interval of O0's own fall includes zero, and so do those of the distances of O2 and O3 from O0",
     lambda: dpo_rates("fall of the loss")["1e-06", "O0"] < dpo_rates(f"fall of the loss: {HALF_WIDTH}")["1e-06", "O0"]
     and max(margins("BF16 layers")["1e-06", level] for level in ("O2", "O3")) < -1),
    ("fp8lm-table4", "In the layers that were trained O2 and O3 lower the mean loss there by seven and by six percent",
     lambda: [round(100 * (1 - dpo_rates("loss in its own layers")["1e-06", level] / math.log(2))) for level in ("O2", "O3")] == [7, 6]),
    ("fp8lm-table4", "lowers the loss by half as much as O0, and O3 by more than two fifths as much; at the highest both lower it by more",
     lambda: (fall := dpo_rates("fall of the loss in BF16 layers, over O0's fall")) and len(fall) == 4
     and round(fall["5e-06", "O2"], 1) == 0.5 and 0.4 < fall["5e-06", "O3"] < 0.5
     and all(0.8 < fall["2e-05", level] < 5 / 6 for level in ("O2", "O3"))),
    ("fp8lm-table4", "At these two rates O2 and O3 end about three percent above O0",
     lambda: {round(mean) for (rate, _), mean in dpo_rates("loss from O0's, in BF16 layers").items() if rate != "1e-06"} == {3}),
    ("fp8lm-table4", "The intervals at the middle rate include zero; at the highest both end near zero",
     lambda: all(margins("BF16 layers")["5e-06", level] < -0.5 and abs(margins("BF16 layers")["2e-05", level]) < 0.5
                 for level in ("O2", "O3"))),
    ("fp8lm-table4", "O2 and O3 end below O0 on average at the two lower rates",
     lambda: all(apart < 0 for (rate, _), apart in dpo_rates("loss from O0's, in its own layers").items() if rate != "2e-05")),
    ("fp8lm-table4", "At the lowest O2's interval excludes zero, and O3's ends near it; at the middle rate both include zero",
     lambda: (inside := margins("its own layers"))["1e-06", "O2"] > 1 > abs(inside["1e-06", "O3"])
     and max(inside["5e-06", level] for level in ("O2", "O3")) < -1),
    ("fp8lm-table4", "they end a third above O0, and above the start with every seed; O2's interval excludes zero, and O3's ends near it",
     lambda: all(round(dpo_rates("loss from O0's, in its own layers")["2e-05", level]) == 33 for level in ("O2", "O3"))
     and min(float(row["own_loss"]) for row in read(RATES) if row["case"] in ("O2 --lr 2e-5", "O3 --lr 2e-5")) > math.log(2)
     and margins("its own layers")["2e-05", "O2"] > 5 and abs(margins("its own layers")["2e-05", "O3"]) < 2),
    ("fp8lm-table4", "with the same seed and rate O0's own loss differs by about a percent between this comparison and the earlier",
     lambda: all(0.008 < abs(apart) < 0.011 for apart in between_trees())),
    ("fp8lm-table4", "An earlier run with one seed, of the same batch, steps and memory, had nearly the same reward before any update",
     lambda: [row["seed"] for row in earlier_ppo()] == ["1234"] * 2
     and all(abs(float(row[key]) - float(today(post.PPO, "reward", "digits")[row["recipe"]]["1234"][key])) <= 0.001
             for row in earlier_ppo() for key in ("global_batch_size", "steps", "weight_mib", "state_mib", "gradient_mib", "peak_mib"))
     and len(before := before_updates()) == 4
     and all(abs(before[level, one] / before[level, other] - 1) < 0.02 for level, one in before
             for twin, other in before if twin == level)),
    ("fp8lm-table4", "There O3 was above O0 in the first ten steps too, by less than half as much, and in the last ten, where both",
     lambda: (apart := {key: float(earlier_ppo()[1][key]) - float(earlier_ppo()[0][key]) for key in ("reward_first", "reward_last")})
     and 0 < apart["reward_first"] < results("fp8lm-table4")["O3: reward `digits` of the first 10 steps, less O0's"] / 2
     and 0 < apart["reward_last"] < 0.01 and min(float(row["reward_last"]) for row in earlier_ppo()) > 0.9
     and [row["recipe"] for row in earlier_ppo()] == ["O0", "O3"]),
    ("fp8lm-table4", "The answers are then far from the reference model's at both levels",
     lambda: min(kl for name, kl in results("fp8lm-table4").items() if "KL from the reference" in name and name.endswith("`digits`")) > 8),
    ("fp8lm-table4", "the reward hardly moved at either level in twenty steps",
     lambda: all(abs(last - first) < 0.02 for first, last in rewards("arithmetic"))),
    ("fp8lm-table4", "DPO lowered its loss at O0 and raised it at O3",
     lambda: results("fp8lm-table4")["DPO, O0: loss of the last steps"] < results("fp8lm-table4")["DPO, O0: loss of the first step"]
     < results("fp8lm-table4")["DPO, O3: loss of the last steps"]),
    ("fp8lm-table5", "FP8 saves a similar share of the weight-related volume",
     lambda: max(abs(ours - paper) for ours, paper in both("fp8lm-table5", "volume saved")) < 4),
    ("fp8lm-table5", "7B at O3 is faster than at O0 by more than in the paper at the same micro-batch",
     lambda: min(from_paper("fp8lm-table5", "^7b, O3, micro-batch 2: times O0's speed")) > 0),
    ("fp8lm-table6", "diverges with every seed, as in the paper",
     lambda: min(by_seed("fp8lm-table6", "#4, validation loss").values()) > 10),
    ("fp8lm-table6", "#3 with its FP8 master ends far above",
     lambda: min(above("fp8lm-table6", "#1, validation loss", "#3, validation loss")) > 0.5),
    ("fp8lm-table7", "by a quarter where both send by NCCL",
     lambda: round(4 * (1 - share7(TP2, "O3 --tp-transport nccl") / share7(TP2, "O0"))) == 1),
    ("fp8lm-table7", "to almost nothing with copies between the cards", lambda: share7(TP2, "O3") < 1),
    ("fp8lm-table7", "At 7B with two data-parallel ranks in addition it rose", lambda: share7(TP2_DP2, "O3") > share7(TP2_DP2, "O0")),
    ("fp8lm-table7", "Their O3 steps are longer than BF16's",
     lambda: all(step7(grid, "O3") > step7(grid, "O0") for grid in (TP2_DP2, "7b, TP 4 x PP 1 x DP 1"))),
    ("fp8lm-table8", "is as even as the paper says, or more even",
     lambda: all(ours <= paper for ours, paper in both("fp8lm-table8", "greedy-cut: spread"))),
    ("fp8lm-table8", "the ranks of 1.3B use equal memory at O3",
     lambda: {results("fp8lm-table8")[f"1.3b, DP {gpus}, O3: spread at rest"] for gpus in (2, 4)} == {0.0}),
    ("fp8lm-table8", "So do the two ranks of 7B, at rest and at the peak of a step, and that peak is within a hundredth of the dry run's",
     lambda: results("fp8lm-table8")["7b, DP 2, O3: spread at rest"] == 0
     and {row["peak_gib_min"] == row["peak_gib_max"] for row in read(grids.DATA_PARALLEL) if (row["preset"], row["case"]) == ("7b", "O3")}
     == {True} and abs(results("fp8lm-table8")["7b, DP 2, O3, micro-batch 2: peak of the fullest rank over the dry run's"] - 1) < 0.01),
    ("fp8lm-table8", "and so do two of 7B at O0 and O2",
     lambda: all(0 < results("fp8lm-table8")[f"7b, DP 2, {level}: spread at rest"] < 0.3 for level in ("O0", "O2"))),
    ("fp8lm-table8", "At O0 four ranks differ a little", lambda: 0 < results("fp8lm-table8")["1.3b, DP 4, O0: spread at rest"] < 0.2),
    ("fp8lm-table10", "sum to more than a hundred percent", lambda: results("fp8lm-table10")[ENTRIES["fp8lm-table10"].headline] > 100),
    ("fp8lm-table4", "A fifth of SmolLM2 is its embedding", lambda: round(5 * 49152 * 576 / 134_515_008) == 1),  # of its config.json
    ("fp8lm-table2", "Longer runs with three seeds confirm this", lambda: set(seeds_of("smollm2/continued")) == {"1234", "1235", "1236"}),
]  # fmt: skip
