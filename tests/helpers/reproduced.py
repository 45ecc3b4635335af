"""Reproduced numbers by their quantity, as the tests of verdicts compare them: the rows of `python -m tools.reproduce` on file."""

import csv
import re
import statistics
from collections.abc import Callable, Mapping

from megatron.lm.evaluation.paired_difference import Interval, PairedDifference, paired_difference
from tools.bench.rows import ROOT
from tools.docs.evidence import Row, read
from tools.docs.post import CURVES, PPO, newest_runs
from tools.docs.rounding import TUNING
from tools.reproduce import keep, versions
from tools.reproduce.fine_tuning import HALF_WIDTH, RATES, Runs, by_level
from tools.reproduce.registry import ENTRIES
from tools.reproduce.throughput import BASE7, MODELS7, OPTIMIZER, SPEEDS7, together

Values = dict[str, float]
TP2, TP2_DP2 = "1.3b, TP 2 x PP 1 x DP 1", "7b, TP 2 x PP 1 x DP 2"
FP8_ENDS, MEAN_SQUARE = "--attention-precision fp8 --output-layer-precision fp8-all", "mean square error"
FP8_TOTALS = re.compile(r"memory, (BF16|FP8)$|micro-batch 4: memory$")


def recorded(entry: str) -> list[keep.Row]:
    """The rows of the largest size of an entry with results."""
    return list(keep.largest(ENTRIES[entry], keep.read(ROOT / keep.RESULTS / f"{entry}.csv"))[1])


def results(entry: str, column: str = "ours", size: str = "") -> Values:
    """Quantity -> its mean over seeds, of a size, by default the largest with results; numbers only."""
    rows = [row for row in keep.read(ROOT / keep.RESULTS / f"{entry}.csv") if row["size"] == size] if size else recorded(entry)
    numbers: dict[str, list[float]] = {}
    for row in rows:
        if not row["x"] and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", row[column]):
            numbers.setdefault(row["quantity"], []).append(float(row[column]))
    return {quantity: statistics.fmean(values) for quantity, values in numbers.items()}


def by_seed(entry: str, quantity: str) -> dict[str, float]:
    return {row["seed"]: float(row["ours"]) for row in recorded(entry) if row["quantity"] == quantity}


def differences(entry: str) -> list[tuple[str, str, PairedDifference]]:
    return keep.loss_differences(ENTRIES[entry], recorded(entry))


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


def ranks(condition: Callable[[Values, int], bool], model: str = "") -> list[int]:
    found = figure7(model)
    return [dp for dp in (2, 4, 8, 16, 32, 64, 128) if f"DP {dp}, pre: SNR" in found and condition(found, dp)]


def less_of_both(found: Values, dp: int) -> bool:
    paper = f"DP {dp}, auto-paper: "
    return (
        found[paper + "underflow, sent"] < found[f"DP {dp}, pre: underflow, sent"]
        and found[paper + "overflow, reduced"] < found[f"DP {dp}, post: overflow, reduced"]
    )


def by_rounding(task: str, rounding: str, measure: str) -> list[tuple[float, float]]:
    """Of O2 and O3 after SFT or DPO: loss from O0's in percent, and the half width of its 95 % interval."""
    found, names = results({"SFT": "fp8lm-table3", "DPO": "fp8lm-table4"}[task]), []
    for level in ("O2", "O3"):
        names.append(f"{task} by seed, {level}, rounded {rounding}: loss from O0's, in {measure}")
    return [(found[name], found[f"{name}: half width of the 95 % interval"]) for name in names]


def llama_shape(quantity: str) -> Values:
    """Of LLaMA-7B's shape by FP8 level: `throughput` or `peak memory` from O0's in percent."""
    found = results("fp8lm-table3")
    return {level: found[f"{level}, LLaMA-7B's shape, micro-batch 1: {quantity} from O0's"] for level in ("O1", "O2", "O3")}


def rewards(name: str) -> list[tuple[float, float]]:
    """Of O0 and O3: PPO's reward of the first and of the last 10 steps."""
    found = results("fp8lm-table4")
    first, last = ([found[f"{level}: reward `{name}` of the {steps} 10 steps"] for level in ("O0", "O3")] for steps in ("first", "last"))
    return list(zip(first, last, strict=True))


def dpo_rates(quantity: str) -> dict[tuple[str, str], float]:
    """A quantity of DPO by learning rate and level."""
    names = {name: re.fullmatch(rf"DPO at learning rate (\S+), (O\d): {quantity}", name) for name in results("fp8lm-table4")}
    return {(match[1], match[2]): results("fp8lm-table4")[name] for name, match in names.items() if match}


def margins(measure: str) -> dict[tuple[str, str], float]:
    """Return by how many points the interval of DPO's loss from O0's excludes zero, by learning rate and level; negative if it includes
    zero."""
    apart = dpo_rates(f"loss from O0's, in {measure}")
    return {key: abs(apart[key]) - width for key, width in dpo_rates(f"loss from O0's, in {measure}: {HALF_WIDTH}").items()}


def tuned3(level: str, pattern: str) -> tuple[float, float]:
    """Of a level of SmolLM2 after SFT: the mean of a quantity and the half width of its 95 % interval."""
    found = results("fp8lm-table3")
    (name,) = (name for name in found if re.fullmatch(f"{level}: {pattern}", name))
    return found[name], found[f"{name}: {HALF_WIDTH}"]


def today(file: str, key: str, value: str) -> Mapping[str, Runs]:
    """Level -> seed -> row of the newest commit, of one model or reward."""
    return by_level([row for row in newest_runs(read(file), key) if row[key] == value], "result")


def earlier_ppo() -> list[Row]:
    """PPO's rows of the reward `digits` at O0 and O3 that are not of the newest commit."""
    rows = [row for row in read(PPO) if row["reward"] == "digits"]
    return [row for row in rows if row["commit"] != rows[-1]["commit"]]


def before_updates() -> dict[tuple[str, str], float]:
    """Reward of PPO's first step by level and commit, in the recorded curves of the reward `digits`."""
    commits = {row["commit"] for row in read(PPO) if row["reward"] == "digits"}
    lines = [line for line in read(CURVES) if (line["run"], line["quantity"], line["step"]) == ("ppo", "reward", "1")]
    return {(line["recipe"], line["commit"]): float(line["value"]) for line in lines if line["commit"] in commits}


def between_trees() -> list[float]:
    """Relative differences of O0's loss after DPO at one rate between two commits, seed by seed."""
    first = {row["seed"]: float(row["own_loss"]) for row in read(TUNING) if (row["task"], row["case"]) == ("dpo", "O0")}
    return [float(row["own_loss"]) / first[row["seed"]] - 1 for row in read(RATES) if row["case"] == "O0 --lr 5e-6"]


def speeds(model: str) -> Values:
    found = results("collage-table7")
    return {name: found[f"{model}, {name}: speed over D's"] for name in ("bf16-a", "collage-light", "collage-plus")}


def figure7(model: str = "", size: str = "") -> Values:
    """Results of one model, by default GPT-125M, whose quantities have no prefix."""
    prefix = f"{model}, " if model else ""
    return {name.removeprefix(prefix): value for name, value in results("fp8lm-figure7", size=size).items() if name.startswith(prefix)}


def table5() -> Values:
    return results("fp8lm-table5")


def orders(size: str, model: str = "") -> list[Values]:
    """SNR by strategy over 128 ranks, added in a tree and in chains with a tree above."""
    by_order: dict[str, Values] = {}
    for name, snr in figure7(model, size).items():
        if match := re.fullmatch(r"DP 128, (.+), added as (.+): SNR", name):
            by_order.setdefault(match[2], {})[match[1]] = snr
    return list(by_order.values())


def real_sums(ending: str, ranks: int = 2) -> list[Values]:
    """For each format that NCCL summed over these ranks: strategy that sums in FP8 -> the quantity with this ending."""
    by_format: dict[str, Values] = {}
    for name, value in results("fp8lm-figure7-nccl").items():
        if (match := re.fullmatch(rf".+, {ranks} ranks, all-reduce, (.+): (.+), {ending}", name)) and match[2] != "fp32-sum":
            by_format.setdefault(match[1], {})[match[2]] = value
    return list(by_format.values())


def gains7() -> list[float]:
    """SNR of both rules for mu over the better of pre and post, at every number of ranks."""
    snr = {tuple(name.split(": SNR")[0].split(", ")): value for name, value in figure7().items() if name.endswith(": SNR")}
    sizes = {dp for dp, strategy, *more in snr if not more}
    return [snr[dp, rule] - max(snr[dp, "pre"], snr[dp, "post"]) for dp in sizes for rule in ("auto-paper", "auto-halve")]


def share7(grid: str, case: str) -> float:
    return results("fp8lm-table7")[f"{grid}, {case}: share of a step in which only NCCL ran"]


def step7(grid: str, case: str) -> float:
    return results("fp8lm-table7")[f"{grid}, {case}: that step"]


def faster_than_te(version: versions.Rows) -> float:
    """Samples per second of FP8 with its larger micro-batch over Transformer Engine's."""
    (te,) = [row[1] for (name, _), row in version.items() if name == "TE"]
    return max(row[1] for (name, _), row in version.items() if name == "FP8") / te


def rising(values: list[float]) -> bool:
    return values == sorted(values)


def error(m: str, v: str, kept: str, what: str = "median error of a group's update") -> float:
    return results("coat-states")[f"m fp8-{m}, v fp8-{v}, {kept}: {what}"]


def over_d(case: str) -> list[float]:
    """Perplexity over D's of Collage's Table 6: plus, light, A."""
    return [results("collage-table6")[f"{option}, {case}: validation perplexity over D's"] for option in ("plus", "light", "a")]


def above_d(option: str, beta2: float) -> list[float]:
    """Validation loss above D's at a beta2 of Collage's Table 6, seed by seed."""
    return above("collage-table6-seeds", f"d, beta2 {beta2}: validation loss", f"{option}, beta2 {beta2}: validation loss")


def verdicts6(option: str) -> list[tuple[int, float, float, str]]:
    """Seeds, ends of the interval and verdict of an option against D, at each beta2 of Collage's Table 6."""
    pairs = [paired for _, other, paired in differences("collage-table6-seeds") if other.startswith(f"{option}, ")]
    return [(len(paired.seeds), *paired.relative.ends, paired.verdict()) for paired in pairs]


def flow_over(name: str, other: str) -> Interval:
    """Relative difference of one emulated flow of COAT from another, with its interval over seeds."""
    return paired_difference(*(by_seed("coat-flow", f"{one}: validation loss") for one in (other, name))).relative


def behind(name: str, after: float, until: float) -> float:
    """Training loss of an emulated flow of COAT above BF16's, mean of the logged steps in a range and of the seeds."""
    within = [row for row in recorded("coat-flow") if row["x"] and after < float(row["x"]) <= until]
    means = [statistics.fmean(float(row["ours"]) for row in within if row["quantity"] == f"{one}, training loss") for one in (name, "bf16")]
    return means[0] - means[1]


def plateau() -> dict[tuple[str, str], float]:
    """First step at which the training loss is below 2 nats per byte, by flow and seed of COAT's emulated flow."""
    left: dict[tuple[str, str], float] = {}
    for row in recorded("coat-flow"):
        if row["x"] and float(row["ours"]) < 2:
            name, _, seed = row["piece"].rpartition(", seed ")
            left[name, seed] = min(float(row["x"]), left.get((name, seed), float("inf")))
    return left


def d_by_torch(model: str, update: str) -> float:
    """Speed of Collage's A over D's with an update of torch."""
    return results("collage-table7")[f"{model}, bf16-a: speed over D's with the update by torch, {update}"]


def gained(model: str, option: str) -> float:
    """Share of the paper's gain over D that torch's slowest update of D explains."""
    ((ours, paper),) = both("collage-table7", f"^{model}, {option}: .*one tensor at a time")
    return (ours - 1) / (paper - 1)


def steps_of7(model: str) -> dict[str, tuple[float, float]]:
    """Of each option of Collage's Table 7: the median step and its range from the 20th to the 80th percentile, ms."""
    preset, micro_batch, flags = MODELS7[model]
    found = together(f"{preset} {flags}".strip(), micro_batch, (BASE7, *SPEEDS7[model]))
    return {option: (float(row["ms"]), float(row["ms_p80"]) - float(row["ms_p20"])) for option, row in found.items()}


def update7(case: str) -> float:
    """Time of D's update at 1.3B, ms."""
    return next(float(row["ms"]) for row in reversed(read(OPTIMIZER)) if (row["case"], row["level"]) == (case, BASE7))


def longest7() -> float:
    """Time of D's update in ms with which A would be as much faster than D at 1.3B as in the paper."""
    steps = steps_of7("1.3b")
    return SPEEDS7["1.3b"]["bf16-a"] * steps["bf16-a"][0] - steps[BASE7][0] + update7("step in a graph")


def seeds_of(name: str) -> list[str]:
    with (ROOT / f"tools/reproduce/results/{name}.csv").open(newline="", encoding="utf-8") as stream:
        return [row["seed"] for row in csv.DictReader(stream)]


def remaining(when: str) -> set[float]:
    """Of O1 and O2, the loss from O0's in percent, to one digit."""
    return {round(results("fp8lm-table2")[f"{level}, continued: held-out loss from O0's {when}"], 1) for level in ("O1", "O2")}


def shrinkage() -> list[float]:
    """By what expansion divides the median error of each pair of formats."""
    found = results("coat-states")
    plain = {name: value for name, value in found.items() if name.endswith("plain: median error of a group's update")}
    return [value / found[name.replace("plain", "expanded")] for name, value in plain.items()]
