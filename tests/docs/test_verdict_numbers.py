"""What the words of verdicts.toml and of README say in numbers ("a fifteenth", "by up to a ninth"), against the results on file.

Tables are generated and need no test here. Each line below has an entry, words of its verdict, and the condition under which they are
true. A quantity that several seeds have is their mean.
"""

import re
import statistics
from collections.abc import Callable

import pytest

from megatron.lm.evaluation.paired_difference import HOLDS, PairedDifference
from msamp.numerics.recipe import O2, O3, Recipe
from tools.bench.rows import ROOT
from tools.docs import losses
from tools.docs.reproduction import words
from tools.reproduce import keep
from tools.reproduce.registry import ENTRIES

Values = dict[str, float]
FP8_TOTALS = re.compile(r"memory, (BF16|FP8)$|micro-batch 4: memory$")


def results(entry: str, column: str = "ours") -> Values:
    """Quantity -> its mean over seeds, of the largest size with results; numbers only."""
    _, rows = keep.largest(ENTRIES[entry], keep.read(ROOT / keep.RESULTS / f"{entry}.csv"))
    numbers: dict[str, list[float]] = {}
    for row in rows:
        if not row["x"] and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", row[column]):
            numbers.setdefault(row["quantity"], []).append(float(row[column]))
    return {quantity: statistics.fmean(values) for quantity, values in numbers.items()}


def by_seed(entry: str, quantity: str) -> dict[str, float]:
    _, rows = keep.largest(ENTRIES[entry], keep.read(ROOT / keep.RESULTS / f"{entry}.csv"))
    return {row["seed"]: float(row["ours"]) for row in rows if row["quantity"] == quantity}


def differences(entry: str) -> list[tuple[str, str, PairedDifference]]:
    _, rows = keep.largest(ENTRIES[entry], keep.read(ROOT / keep.RESULTS / f"{entry}.csv"))
    return keep.loss_differences(ENTRIES[entry], rows)


def above(entry: str, base: str, other: str) -> list[float]:
    """Differences of losses, seed by seed."""
    bases, others = by_seed(entry, base), by_seed(entry, other)
    return [others[seed] - bases[seed] for seed in others if seed in bases]


def from_paper(entry: str, pattern: str) -> list[float]:
    """Ours over the paper's, minus 1, of the quantities that match."""
    return [ours / paper - 1 for ours, paper in both(entry, pattern)]


def both(entry: str, pattern: str = "") -> list[tuple[float, float]]:
    """Ours and the paper's, of the quantities that match."""
    ours, paper = results(entry), results(entry, "paper")
    return [(ours[name], paper[name]) for name in ours if name in paper and re.search(pattern, name)]


def ranks(condition: Callable[[Values, int], bool]) -> list[int]:
    found = results("fp8lm-figure7")
    return [dp for dp in (2, 4, 8, 16, 32, 64, 128) if condition(found, dp)]


def less_of_both(found: Values, dp: int) -> bool:
    paper = f"DP {dp}, auto-paper: "
    return (
        found[paper + "underflow, sent"] < found[f"DP {dp}, pre: underflow, sent"]
        and found[paper + "overflow, reduced"] < found[f"DP {dp}, post: overflow, reduced"]
    )


def speeds(model: str) -> Values:
    found = results("collage-table7")
    return {name: found[f"{model}, {name}: speed over D's"] for name in ("bf16-a", "collage-light", "collage-plus")}


def figure7() -> Values:
    return results("fp8lm-figure7")


def table5() -> Values:
    return results("fp8lm-table5")


SAID: list[tuple[str, str, Callable[[], bool]]] = [
    ("fp8lm-figure4", "At 1.3B O3 ends a little below BF16 with each of three seeds",
     lambda: (d := above("fp8lm-figure4", "bf16 at 1.3B: validation loss", "O3 at 1.3B: validation loss")) and len(d) == 3 and max(d) < 0),
    ("fp8lm-figure7", "from four ranks on the paper's rule for mu has less of both",
     lambda: ranks(less_of_both) == [4, 8, 16, 32, 64, 128]),
    ("fp8lm-figure7", "with a fifteenth of its underflow",
     lambda: round(figure7()["DP 128, pre: underflow, sent"] / figure7()["DP 128, auto-halve: underflow, sent"]) == 15),
    ("fp8lm-gradient-sums", "With sixteen simulated ranks every strategy ends at the loss of FP32 gradients",
     lambda: (pairs := differences("fp8lm-gradient-sums")) and len(pairs) == 5
     and all(len(difference.seeds) == 3 and difference.verdict() == HOLDS for *_, difference in pairs)),
    ("fp8lm-table2", "about half of it because that text was read in FP8",
     lambda: 0.35 < 1 - (results("fp8lm-table2")["held-out text: bits per byte, O3 over O0, both exported to BF16"] - 1)
     / (results("fp8lm-table2")["held-out text: bits per byte, O3 over O0, each read in its own precision"] - 1) < 0.65),
    ("fp8lm-table2", "FP8 layers cost a percent of the loss before any training", lambda: remaining("before training") == {1.0}),
    ("fp8lm-table2", "a little more than half of that remains", lambda: remaining("after it, each in its own layers") == {0.6}),
    ("fp8lm-table2", "a fifth of a percent, at every level and with COAT", lambda: remaining("after it, both in BF16 layers") == {0.2}),
    ("fp8lm-table3", "this explains about half of the difference after training",
     lambda: 0.4 < results("fp8lm-table3")["O3: held-out loss from O0's before any step"]
     / results("fp8lm-table3")["O3: held-out loss from O0's, each read in its own precision"] < 0.6),
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


def remaining(when: str) -> set[float]:
    """Of O1 and O2, the loss from O0's in percent, to one digit."""
    return {round(results("fp8lm-table2")[f"{level}, continued: held-out loss from O0's {when}"], 1) for level in ("O1", "O2")}


def shrinkage() -> list[float]:
    """By what expansion divides the median error of each pair of formats."""
    found = results("coat-states")
    plain = {name: value for name, value in found.items() if name.endswith("plain: median error of a group's update")}
    return [value / found[name.replace("plain", "expanded")] for name, value in plain.items()]


@pytest.mark.promise("Tools", "Numbers in the words of a verdict are those of its results.")
@pytest.mark.parametrize(("entry", "text", "true"), SAID, ids=[f"{entry}: {text[:40]}" for entry, text, _ in SAID])
def test_words_of_verdicts_are_those_of_the_results(entry, text, true):
    said = words()[entry]
    assert text in f"{said.agree} {said.cause}", "the words have changed: change or drop their line here"
    assert true()


def test_readme_says_of_the_longest_run_what_its_curve_says():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "The [longest run](docs/results/results.md#a-longer-run) has one seed" in readme
    assert " ".join(losses.longest().text.split()) in readme
    assert {line[0].split(",")[1] for line in losses.judged().cells} == {" seed 1234"}


def test_the_longest_run_is_nearer_on_held_out_text_than_on_text_that_it_has_read():
    """As its page says: the held-out distance falls, that of training grows."""
    held_out, trained = ([float(value) for value in table.cells[1][1:]] for table in (losses.judged(), losses.longer_run()))
    assert held_out == sorted(held_out, reverse=True)
    assert trained == sorted(trained)
    assert held_out[-1] < 0.2 < trained[-1]


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
