"""What the words of verdicts.toml and of README say in numbers ("a fifteenth", "by up to a ninth"), against the results on file.

Tables are generated and need no test here. Each line below has an entry, words of its verdict, and the condition under which they are
true. A quantity that several seeds have is their mean.
"""

import re
import statistics
from collections.abc import Callable

import pytest

from helpers import fp8lm_words
from helpers.reproduced import (
    FP8_ENDS,
    FP8_TOTALS,
    MEAN_SQUARE,
    above,
    above_d,
    behind,
    both,
    by_seed,
    d_by_torch,
    differences,
    error,
    faster_than_te,
    flow_over,
    from_paper,
    gained,
    longest7,
    over_d,
    plateau,
    remaining,
    results,
    rising,
    shrinkage,
    speeds,
    steps_of7,
    table5,
    update7,
    verdicts6,
)
from megatron.lm.evaluation.paired_difference import DOES_NOT_HOLD, EFFECT, HOLDS, TOO_SMALL
from msamp.numerics.recipe import O2, O3, Recipe
from tools.bench.rows import ROOT
from tools.docs import losses
from tools.docs.evidence import read
from tools.docs.reproduction import words
from tools.reproduce import coat, coat_flow, grids, versions
from tools.reproduce.registry import ENTRIES
from tools.reproduce.throughput import SPEEDS7

SAID: list[tuple[str, str, Callable[[], bool]]] = [
    *fp8lm_words.SAID,
    ("collage-table5", "D has one seed", lambda: len(by_seed("collage-table5", "d, 125M: validation loss")) == 1),
    ("fp8lm-first-version", "FP8 became faster relative to BF16 and to Transformer Engine, and saved less of BF16's memory at 175B",
     lambda: all(faster_than_te(versions.SECOND[model]) > faster_than_te(versions.FIRST[model]) for model in versions.FIRST)
     and (papers := results("fp8lm-first-version", "paper")) and all(papers[name] > papers[name.replace("second", "first", 1)]
                                                                    for name in papers if re.match("second.*more samples", name))
     and papers["second version, 175b: memory saved by FP8"] < papers["first version, 175b: memory saved by FP8"]),
    ("fp8lm-first-version", "saves more memory than in either version, and the planner predicts a larger gain in speed than either",
     lambda: all(ours > paper for ours, paper in both("fp8lm-first-version", "memory saved|more samples"))),
    ("collage-figure3", "A loses most of its updates, and the others almost none",
     lambda: (lost := [results("collage-figure3")[f"{option}, lost arithmetic, mean"] for option in ("a", "light", "kahan", "plus", "d")])
     and lost[0] > 50 and max(lost[1:]) < 1),
    ("collage-figure4", "both the more the larger the model; over the four sizes more than the paper's means",
     lambda: all(rising([results("collage-figure4")[f"{option}, {size}: peak memory saved against D"]
                         for size in ("125M", "1.3B", "2.6B", "6.7B")]) for option in ("light", "plus"))
     and all(ours > paper for ours, paper in both("collage-figure4"))),
    ("collage-figure4-grids", "save most at OpenLLaMA-7B, and the more the larger the model",
     lambda: all(rising([results("collage-figure4-grids")[f"{option}, {model}: saved against D"] for model in grids.MODELS4])
                 for option in ("light", "plus"))),
    ("collage-table3", "plus ends below option D, light between them, and A above",
     lambda: all(rising([results("collage-table3")[f"plus, {phase}: perplexity over D's"],
                         results("collage-table3")[f"light, {phase}: perplexity over D's"], 1.0,
                         results("collage-table3")[f"a, {phase}: perplexity over D's"]]) for phase in ("phase1", "phase2"))),
    ("collage-table4", "give BoolQ's majority answer at every option", lambda: len(set(results("collage-table4").values())) == 1),
    ("collage-table5", "by many times the distance between BF16's own seeds",
     lambda: results("collage-table5")["a, 125M: validation loss"] - results("collage-table5")["d, 125M: validation loss"]
     > 5 * results("fp8lm-figure4")["125M, all levels: range of BF16's own seeds"] / 100 * 5.14),
    ("collage-table6", "the order is the paper's with either batch: D, plus, light, A",
     lambda: rising([1.0, *over_d("beta2 0.999")]) and rising([1.0, *over_d("beta2 0.999, twice the batch")])),
    ("collage-table6", "At 0.99 plus and light end near D, as in the paper, and A above it by a little more than in the paper",
     lambda: (found := over_d("beta2 0.99")) and max(abs(ratio - 1) for ratio in found[:2]) < 0.01 and 15.80 / 15.03 < found[2] < 1.1),
    ("collage-table6", "But A is as far above at beta2 0.95, where the paper's A is close",
     lambda: over_d("beta2 0.95")[2] > over_d("beta2 0.999")[2]),
    ("collage-table6", "confirm A's distance at each beta2, and with every seed light's above D at 0.999; that plus ends above D",
     lambda: all(abs(results("collage-table6-seeds")[name] - results("collage-table6")[name]) < 0.02
                 for name in results("collage-table6-seeds") if name.startswith("a, ") and "perplexity" in name)
     and min(above_d("light", 0.999)) > 0 > min(above_d("plus", 0.999))),
    ("collage-table6-seeds", "With three seeds A ends above D at every beta2, and each interval excludes equal losses",
     lambda: [(seeds, least > 0, verdict) for seeds, least, _, verdict in verdicts6("a")] == [(3, True, DOES_NOT_HOLD)] * 3),
    ("collage-table6-seeds", "with every seed it is smaller at 0.99 than at 0.95, and at 0.999 it is about as large as at 0.95",
     lambda: all(less < more for less, more in zip(above_d("a", 0.99), above_d("a", 0.95), strict=True))
     and abs(statistics.fmean(above_d("a", 0.999)) / statistics.fmean(above_d("a", 0.95)) - 1) < 0.15),
    ("collage-table6-seeds", "Only from 0.99 to 0.999 does it grow, with every seed, as in the paper",
     lambda: all(less < more for less, more in zip(above_d("a", 0.99), above_d("a", 0.999), strict=True))),
    ("collage-table6-seeds", "above the paper's at 0.95 and 0.99, and below it at 0.999",
     lambda: [ours > paper for ours, paper in both("collage-table6-seeds", "^a, ")] == [True, True, False]),
    ("collage-table6-seeds", "no interval excludes equal losses; but the intervals are too wide to say that the losses are equal",
     lambda: [(least < 0 < most, verdict) for _, least, most, verdict in verdicts6("plus")] == [(True, TOO_SMALL)] * 3),
    ("collage-table6-seeds", "Light ends above D at 0.999 with every seed, as in the paper; its interval reaches just below zero",
     lambda: [(seeds, -0.0005 < least < 0) for seeds, least, *_ in verdicts6("light")] == [(3, True)] and min(above_d("light", 0.999)) > 0),
    ("collage-table6-seeds", "D itself ends lowest at 0.99 with every seed",
     lambda: all(least < min(others) for least, *others in zip(*(
         by_seed("collage-table6-seeds", f"d, beta2 {beta2}: validation loss").values() for beta2 in (0.99, 0.95, 0.999)), strict=True))),
    ("coat-group-scaling", "takes much less time than one that reads its tensor twice, and producer and cast together are faster too",
     lambda: all(value > (1.05 if "norm" in name else 1.5)
                 for name, value in results("coat-group-scaling").items() if "one stage" in name)),
    ("coat-loss", "above it with one seed and below it with two",
     lambda: sorted(apart > 0 for apart in above("coat-loss", "bf16: validation loss", "coat: validation loss")) == [False, False, True]),
    ("coat-llama", "O3 is faster than COAT with two sequences and takes less memory",
     lambda: (found := results("coat-llama"))["O3, micro-batch 2: tokens a second"] > found["coat, micro-batch 2: tokens a second"]
     and found["O3, micro-batch 2: peak memory"] < found["coat, micro-batch 2: peak memory"]),
    ("coat-memory", "With attention and the LM head in FP8, which COAT leaves in BF16, it comes close",
     lambda: 0.95 < results("coat-memory")[f"coat {FP8_ENDS}, micro-batch 4: times BF16's speed"] / 1.43 < 1),
    ("coat-memory", "O3 is faster than COAT and saves nearly as much",
     lambda: (found := results("coat-memory"))["O3, micro-batch 4: times BF16's speed"] > found["coat, micro-batch 4: times BF16's speed"]
     and 0.95 < found["O3, micro-batch 4: times less memory"] / found["coat, micro-batch 4: times less memory"] < 1),
    ("coat-flow", "with every layer's input and output in FP8, with each seed, and the interval excludes equal losses",
     lambda: min(above("coat-flow", "bf16: validation loss", "FP8 flow: validation loss")) > 0
     and flow_over("FP8 flow", "bf16").ends[0] > 0),
    ("coat-flow", "Most of that comes from the residual stream",
     lambda: (found := results("coat-flow"))["FP8 flow, residual stream in BF16: validation loss"] - found["bf16: validation loss"]
     < 0.3 * (found["FP8 flow: validation loss"] - found["bf16: validation loss"])),
    ("coat-flow", "by about as much as with FP8 GEMMs alone, whose interval excludes equal losses too",
     lambda: flow_over("FP8 GEMMs", "bf16").ends[0] > 0 and abs(statistics.fmean(gemms := above(
         "coat-flow", "bf16: validation loss", "FP8 GEMMs: validation loss")) / statistics.fmean(above(
             "coat-flow", "bf16: validation loss", "FP8 flow, residual stream in BF16: validation loss")) - 1) < 0.1 and len(gemms) == 3),
    ("coat-flow", "cannot be distinguished from zero, with an interval wider than the cost of FP8 GEMMs",
     lambda: (least := flow_over("FP8 flow, residual stream in BF16", "FP8 GEMMs").ends[0]) < 0
     and -least > flow_over("FP8 GEMMs", "bf16").mean),
    ("coat-flow", "after three hundred steps, the full flow ended highest too, but FP8 GEMMs alone ended at BF16's",
     lambda: (found := results("coat-flow", size="small"))["FP8 flow: validation loss"] == max(found.values())
     and abs(found["FP8 GEMMs: validation loss"] / found["bf16: validation loss"] - 1) < 0.0005
     and max(found.values()) / found["bf16: validation loss"] - 1 < EFFECT
     and (coat.FLOWS["small"][0].layers, coat.FLOWS["small"][0].steps) == (4, 300)),
    ("coat-flow", "all twelve stay above 2 nats per byte for more than a third of their steps",
     lambda: len(left := plateau()) == 12 and min(left.values()) > coat.FLOWS["full"][0].steps / 3),
    ("coat-flow", "falls below that sixty steps later than BF16's, else within thirty steps of it",
     lambda: (left := plateau()) and all(abs(left[name, seed] - left["bf16", seed]) <= 30 for name, seed in left if name != "FP8 flow")
     and [left["FP8 flow", seed] - left["bf16", seed] for seed in ("1234", "1235", "1236")] == [60, 60, 60]),
    ("coat-flow", "every FP8 flow is farther behind BF16 than at the end, where it has made up two fifths of the distance or more",
     lambda: all(0 < behind(name, 1800, 2000) < 0.6 * behind(name, 1000, 1200) for name in coat_flow.FLOWS if name != "bf16")),
    ("coat-share", "less than a third with COAT's formats",
     lambda: max(value for name, value in results("coat-share").items() if "kept as coat" in name) < 100 / 3),
    ("coat-states", "the second moments one that is several times wider", lambda: 4 < min(from_paper("coat-states", "^range of v")) < 9),
    ("coat-states", "E4M3 suits the first moment better than E5M2, and for the second the two are nearly equal after expansion",
     lambda: all(error("e4m3", v, kept) < error("e5m2", v, kept) for v in ("e4m3", "e5m2") for kept in ("plain", "expanded"))
     and all(abs(error(m, "e4m3", "expanded") / error(m, "e5m2", "expanded") - 1) < 0.05 for m in ("e4m3", "e5m2"))),
    ("coat-states", "Without expansion E4M3's mean square error is far larger",
     lambda: all(error(m, "e4m3", "plain", MEAN_SQUARE) > 20 * error(m, "e5m2", "plain", MEAN_SQUARE) for m in ("e4m3", "e5m2"))),
    ("slides-classification", "reach the same accuracy on average over eight seeds",
     lambda: abs(results("slides-classification")["mixed precision less FP32, mean"])
     < results("slides-classification")["half width of its 95 % interval"]
     and len(by_seed("slides-classification", "FP32: accuracy")) == 8),
    ("slides-detector", "It fails only if its loss is made 2^9 times smaller, and a loss scale then restores it",
     lambda: {name for name, value in results("slides-detector").items() if "average precision" in name and value < 0.4}
     == {"FP16, loss times 2^-9, loss scale 1.0: average precision"}),
    ("slides-lstm", "clearly above FP32's, and a loss scale of 8 restores it almost completely",
     lambda: results("slides-lstm")["FP16, loss scale 1.0: validation loss"] > 0.1 + results("slides-lstm")["FP32: validation loss"]
     > 0.095 + results("slides-lstm")["FP16, loss scale 8.0: validation loss"]),
    ("slides-numbers", "Values between 2^-25 and 2^-24 become 2^-24 rather than 0",
     lambda: results("slides-numbers")["0.75 x 2^-24 becomes"] == pytest.approx(2.0**-24, rel=1e-4)),
    ("slides-numbers", "infinity begins one above the printed 65519",
     lambda: results("slides-numbers")["smallest whole number that becomes infinity"] == 65520),
    ("slides-weight-copy", "An update of at most 2^-11 of a weight is lost in FP16, and arrives in an FP32 copy",
     lambda: all(share == ("FP32" in name or int(re.search(r"2\^-(\d+)", name)[1]) < 11)
                 for name, share in results("slides-weight-copy").items())),
    ("fp8lm-gradient-sums", "With sixteen simulated ranks every strategy ends at the loss of FP32 gradients",
     lambda: (pairs := differences("fp8lm-gradient-sums")) and len(pairs) == 5
     and all(len(difference.seeds) == 3 and difference.verdict() == HOLDS for *_, difference in pairs)),
    ("fp8lm-table2", "about half of it because that text was read in FP8",
     lambda: 0.35 < 1 - (results("fp8lm-table2")["held-out text: bits per byte, O3 over O0, both exported to BF16"] - 1)
     / (results("fp8lm-table2")["held-out text: bits per byte, O3 over O0, each read in its own precision"] - 1) < 0.65),
    ("fp8lm-table2", "FP8 layers cost a percent of the loss before any training", lambda: remaining("before training") == {1.0}),
    ("fp8lm-table2", "a little more than half of that remains", lambda: remaining("after it, each in its own layers") == {0.6}),
    ("fp8lm-table2", "a fifth of a percent, at every level and with COAT", lambda: remaining("after it, both in BF16 layers") == {0.2}),
    ("fp8lm-table3", "differ by less than half a percent",
     lambda: abs(results("fp8lm-table3")["O3: bits per byte of held-out text over O0's, both exported to BF16"] - 1) < 0.005),
    ("fp8lm-table4", "A step of PPO took three times as long at O3",
     lambda: round(results("fp8lm-table4")["PPO, O3: time of a step"] / results("fp8lm-table4")["PPO, O0: time of a step"]) == 3),
    ("fp8lm-table4", "O3 reaches the paper's figure from states with FP32 gradients",
     lambda: results("fp8lm-table4")["O3, LLaMA-7B counted: states and gradients from O0's with FP32 gradients"] <= -62
     < results("fp8lm-table4")["O3, LLaMA-7B counted: states and gradients from O0's with BF16 gradients"]),
    ("fp8lm-table5", "BF16's volume agrees within a few percent", lambda: max(map(abs, from_paper("fp8lm-table5", "volume, BF16"))) < 0.04),
    ("fp8lm-table5", "FP8's is up to a ninth below the paper's", lambda: 0.1 < -min(from_paper("fp8lm-table5", "volume, FP8")) < 1 / 8.5),
    ("fp8lm-table5", "by a sixth to almost a half",
     lambda: 0.155 < -max(from_paper("fp8lm-table5", FP8_TOTALS.pattern)) < 0.17
     and 0.42 < -min(from_paper("fp8lm-table5", FP8_TOTALS.pattern)) < 0.5),
    ("fp8lm-table5", "O0 fits no more than two sequences without ZeRO", lambda: table5()["7b, O0: largest micro-batch"] == 2),
    ("fp8lm-table5", "all shares are below the paper's", lambda: max(from_paper("fp8lm-table5", "weight-related communication, pred")) < 0),
    ("fp8lm-table5", "are about as much faster at O3 than at O0 as the paper's 175B",
     lambda: max(map(abs, from_paper("fp8lm-table5", "^175b, 3 layers.* O3, .*times O0's speed"))) < 0.05),
    ("fp8lm-table5", "and faster than with Transformer Engine by more than in the paper",
     lambda: min(from_paper("fp8lm-table5", "^175b, 3 layers.* O3, .*times megatron te-delayed's speed")) > 0),
    ("fp8lm-table5", "they take less than half of O0's memory",
     lambda: table5()["175b, 3 layers whole on a card, O3, micro-batch 1: peak memory"]
     < 0.5 * table5()["175b, 3 layers whole on a card, O0, micro-batch 1: peak memory"]),
    ("fp8lm-table5", "takes more memory than BF16",
     lambda: table5()["7b, te-delayed, micro-batch 2: peak memory"] > table5()["7b, te-bf16, micro-batch 2: peak memory"]),
    ("fp8lm-table6", "it ends a little above with every seed",
     lambda: min(above("fp8lm-table6", "#1, validation loss", "#2a, validation loss")) > 0),
    ("fp8lm-table6", "#2b above #1 with every seed", lambda: min(above("fp8lm-table6", "#1, validation loss", "#2b, validation loss")) > 0),
    ("fp8lm-table7", "agree exactly with those computed from shapes",
     lambda: {value for name, value in results("fp8lm-table7").items() if "counted over shapes" in name} == {1.0}),
    ("fp8lm-first-version", "changed four fifths of the numbers of Table 5",
     lambda: round(5 * results("fp8lm-first-version")["numbers of Table 5 that the second version changed"]
     / results("fp8lm-first-version")["numbers of Table 5"]) == 4),
    ("fp8lm-first-version", "memory by up to a tenth, speeds and MFU by up to a sixth, and the share of communication by up to a half",
     lambda: [round(abs(value)) for name, value in results("fp8lm-first-version").items() if "largest change" in name]
     == [10, 12, 15, 13, 56, 0]),
    ("collage-figure3", "Weights are more than two thousand times their update",
     lambda: all(2000 < value < 3000 for name, value in results("collage-figure3").items() if "over that of the update" in name)),
    ("collage-figure3", "EDQ orders A, light, plus, D",
     lambda: (edq := [results("collage-figure3")[f"{option}, EDQ, mean"] for option in ("a", "light", "plus", "d")]) == sorted(edq)),
    ("collage-figure3-middle", "A ends about five percent above D, with every seed",
     lambda: min(above("collage-figure3-middle", "d: validation loss", "a: validation loss")) > 0
     and round(100 * (results("collage-figure3-middle")["a: validation loss"]
                      / results("collage-figure3-middle")["d: validation loss"] - 1)) == 5),
    ("collage-figure3-middle", "Light and Kahan summation are within the difference that these pages count of D too",
     lambda: all(difference.verdict() == HOLDS for base, other, difference in differences("collage-figure3-middle")
                 if other.startswith(("light", "kahan", "plus")))),
    ("collage-figure4-grids", "All savings are a few points above the paper's",
     lambda: all(1 < ours - paper < 6 for ours, paper in both("collage-figure4-grids"))),
    ("collage-table5-right", "No loss rises by more than a tenth of a nat in ten steps",
     lambda: max(value for name in results("collage-table5-right") if "largest rise" in name
                 for value in by_seed("collage-table5-right", name).values()) < 0.1),
    ("collage-table5-right", "light is below D with every seed",
     lambda: max(above("collage-table5-right", "d, beta2 0.99: validation loss", "light, beta2 0.99: validation loss")) < 0),
    ("collage-table5-right", "and A does with every seed",
     lambda: min(above("collage-table5-right", "d, beta2 0.95: validation loss", "a, beta2 0.95: validation loss")) > 0),
    ("collage-table6", "loses more than half of its updates",
     lambda: results("collage-table6")["a, beta2 0.999: lost arithmetic, mean"] > 50),
    ("collage-table7", "On one H200 A is about a tenth faster than D at 6.7B, and a few hundredths at 1.3B",
     lambda: round(speeds("6.7b")["bf16-a"], 1) == 1.1 and 1.02 < speeds("1.3b")["bf16-a"] < 1.06),
    ("collage-table7", "light and A, and plus and D, differ by less than steps of one option do",
     lambda: all(abs(steps_of7("1.3b")[a][0] - steps_of7("1.3b")[b][0]) < min(steps_of7("1.3b")[a][1], steps_of7("1.3b")[b][1])
                 for a, b in (("collage-light", "bf16-a"), ("collage-plus", "bf16-d")))),
    ("collage-table7", "No update of D that we measured gives the paper's multiples, ours or any of torch's",
     lambda: all(ours < paper for ours, paper in both("collage-table7", "speed over D's(?! with)|one tensor") if paper != 1)),
    ("collage-table7", "three tenths faster than D at 1.3B and about twice as fast at 6.7B, where the paper has almost four times",
     lambda: [round(d_by_torch(model, "one tensor at a time"), 1) for model in ("1.3b", "6.7b")] == [1.3, 2.1]),
    ("collage-table7", "with torch's fused update, a tenth and a third",
     lambda: round(d_by_torch("1.3b", "fused"), 1) == 1.1 and round(3 * (d_by_torch("6.7b", "fused") - 1)) == 1),
    ("collage-table7", "explains about a third to two fifths of each gain",
     lambda: (shares := [gained(model, option) for model, options in SPEEDS7.items() for option in options])
     and 0.33 < min(shares) < max(shares) < 0.43),
    ("collage-table7", "would have to take ten times as long as ours, more than twice as long as torch's slowest",
     lambda: round(longest7() / update7("step in a graph")) == 10 and longest7() > 2 * update7("step by torch, one tensor at a time")),
    ("collage-table7", "A is the fastest from 2.7B on, light at 1.3B",
     lambda: [max(speeds(model), key=speeds(model).get) for model in ("1.3b", "2.7b", "6.7b")] == ["collage-light", "bf16-a", "bf16-a"]),
    ("coat-llama", "COAT takes about half of the memory that BF16 takes with one",
     lambda: round(results("coat-llama")["bf16, micro-batch 1: peak memory"]
     / results("coat-llama")["coat, micro-batch 2: peak memory"]) == 2),
    ("coat-memory", "COAT saves more memory than claimed, and its multiple of BF16's speed is smaller than claimed",
     lambda: min(from_paper("coat-memory", "^coat, micro-batch 4: times less memory")) > 0
     > max(from_paper("coat-memory", "^coat, micro-batch 4: times BF16"))),
    ("coat-share", "Norms and SwiGLU account for nearly half", lambda: 40 < results("coat-share")[ENTRIES["coat-share"].headline] < 50),
    ("coat-share", "Linear layers account for more than a quarter",
     lambda: min(value for name, value in results("coat-share").items() if name.endswith("linear layers")) > 25),
    ("coat-states", "two to four times smaller in every pair",
     lambda: results("coat-states")[ENTRIES["coat-states"].headline] > 1.9 and max(shrinkage()) < 4),
    ("slides-tensor-cores", "an order of magnitude faster than FP32 in large products",
     lambda: all(10 < results("slides-tensor-cores")[f"{n} x {n}: FP16 over FP32"] < 16 for n in (2048, 4096, 8192))),
    ("slides-tensor-cores", "loses most of that", lambda: results("slides-tensor-cores")["4095 x 4095: FP16 over FP32"] < 5),
    ("slides-lstm", "but not most", lambda: 15 < results("slides-lstm")[ENTRIES["slides-lstm"].headline] < 50),
    ("slides-small-updates", "several times as many as 5 % are, with either model",
     lambda: all(15 < value < 40 for name, value in results("slides-small-updates").items() if "learning rate" in name)),
    ("slides-small-updates", "far fewer than 5 % of them",
     lambda: all(0 < value < 1 for name, value in results("slides-small-updates").items() if "learning rate" not in name)),
]  # fmt: skip


# Words with a number that no result has, because they say how something was run or defined, or what was not measured.
NUMBER = re.compile(
    r"\b(half|thirds?|quarters?|(fif|six|seven|eigh|nin|ten|fifteen)ths?|hundredths|percent|(two|three|four|several|many|\d+) times|twice|"
    r"(every|each|one|two|three|eight|twelve) seeds?|magnitude|decibel)\b|%"
)
WITHOUT_RESULT = {
    "fp8lm-figure1": ["Its other half"],
    "fp8lm-figure4": ["The twelve seeds round masters and moments stochastically"],
    "fp8lm-table2": ["a paired test would be several times more sensitive"],
    "fp8lm-table3": ["less than half a step of the FP16 master", "less than half a step of BF16"],
    "fp8lm-table4": ["less than half a step of BF16"],
    "collage-table3": ["and one seed"],
    "collage-table4": ["was interrupted twice"],
    "collage-table6-seeds": ["averages over half of the run"],
    "collage-table7": ["moves twice the bytes of A's"],
    "coat-flow": ["are rounded to E4M3 twice per layer"],
}


@pytest.mark.promise("Tools", "Numbers in the words of a verdict are those of its results.")
@pytest.mark.parametrize(("entry", "text", "true"), SAID, ids=[f"{entry}: {text[:40]}" for entry, text, _ in SAID])
def test_words_of_verdicts_are_those_of_the_results(entry, text, true):
    said = words()[entry]
    assert text in f"{said.agree} {said.cause}", "the words have changed: change or drop their line here"
    assert true()


def test_every_number_in_the_words_has_its_line():
    covered = {name: list(phrases) for name, phrases in WITHOUT_RESULT.items()}
    for name, text, _ in SAID:
        covered.setdefault(name, []).append(text)
    for name, one in words().items():
        text = f"{one.agree} {one.cause}"
        for phrase in covered.get(name, ()):
            text = text.replace(phrase, re.sub(r"[^.:; ]", "_", phrase))
        for sentence in re.split(r"(?<=[.:;]) ", text):
            assert "_" in sentence or not NUMBER.search(sentence), f"{name}: add a line for {sentence!r}"


def test_readme_says_of_the_longest_run_what_its_curve_says():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "The [longest run](docs/results/results.md#a-longer-run) has one seed" in readme
    assert " ".join(losses.longest().text.split()) in readme
    assert {line[0].split(",")[1] for line in losses.judged().cells} == {" seed 1234"}


def test_the_longest_run_is_nearer_on_held_out_text_than_on_text_that_it_has_read():
    """As its page says, at both levels."""
    judged, trained = ({line[0]: float(line[-1]) for line in table.cells[1:]} for table in (losses.judged(), losses.longer_run()))
    assert len(judged) == 2
    assert all(0 < judged[name] < trained[name] for name in judged)


def test_items_of_the_longest_run_say_what_its_page_says():
    """On documents both levels are above O0, on last words no difference shows, and in agreement both are ahead in most sets."""
    apart = {(row["kind"], row["model"]): (float(row["above_base"]), float(row["half_width"])) for row in read(losses.ITEMS)}
    agreement = {key: value for key, value in apart.items() if "_english" in key[0] and key[1] != "O0"}
    for level in ("O3", "O2"):
        mean, half = apart["documents, bits per byte", level]
        assert mean > half
        mean, half = apart["last words, share correct", level]
        assert abs(mean) < half
        of_level = [mean for (_, model), (mean, _) in agreement.items() if model == level]
        assert (sum(mean > 0 for mean in of_level), len(of_level)) == (12, 16)
    assert max(mean for mean, _ in agreement.values()) == 0.15


def test_readme_counts_its_answers():
    assert "[ten answers](docs/reference/faq.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", (ROOT / "docs/reference/faq.md").read_text(encoding="utf-8"), re.MULTILINE)) == 10


def test_readme_says_from_how_many_ranks_on_o3_needs_less_memory_than_o2():
    """Weight and gradient are whole on every rank, ZeRO divides the rest; O2's weight is its own master."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "O2 needs the least memory on one or two GPUs, O3 on three or more" in readme

    def held(recipe: Recipe, ranks: int) -> float:
        formats = recipe.formats_of("linear")
        master = 0 if formats.master == recipe.weight else formats.master.bytes
        return recipe.weight.bytes + formats.grad.bytes + (master + formats.m.bytes + formats.v.bytes) / ranks

    assert held(O2, 1) < held(O3, 1)
    assert held(O2, 2) <= held(O3, 2)
    assert all(held(O3, ranks) < held(O2, ranks) for ranks in (3, 4, 8, 64))
