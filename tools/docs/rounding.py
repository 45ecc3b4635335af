"""Tables of stochastic and nearest rounding of masters and moments: losses of paired seeds, speed, small updates, fine-tuning."""

import re
import shlex
import statistics
from collections.abc import Callable

from megatron.lm.evaluation.paired_difference import Interval, paired_difference
from msamp.numerics.recipe import by_name
from tools.docs import losses
from tools.docs.cells import BENCH, REPRODUCE, Sentence, Table, pick
from tools.docs.evidence import Row

FOLDER = f"{REPRODUCE}/rounding"
TUNING, SMALL, TIMES = f"{FOLDER}/tuning.csv", f"{FOLDER}/small_updates.csv", f"{BENCH}/rounding.csv"
NEAREST, STOCHASTIC = "nearest", "stochastic"
LEVELS = ("O2", "O3")  # the levels that were trained and timed


def flags(masters: str, moments: str = "") -> str:
    """Return the flags for a rounding of masters, and of moments if it differs."""
    return f"--master-rounding {masters} --moment-rounding {moments or masters}"


def roundings(case: str) -> tuple[str, str]:
    """Return how masters and moments are rounded in a case: by its flags, or else by the recipe's default.

    Args:
        case: a recipe, optionally with the flags of both roundings.
    """
    match = re.search(r"--master-rounding (\w+) --moment-rounding (\w+)", case)
    if match is not None:
        return match[1], match[2]
    states = by_name(case.split()[0]).states
    return states.master_rounding, states.moment_rounding


def difference(case: str, base: str) -> Interval:
    """Return the relative difference of the last validation losses of two cases of the folder, over the seeds that both have."""
    return losses.paired(case, base, *losses.files(FOLDER)).relative


def loss() -> Table:
    """Last validation losses with each rounding, and their differences from BF16 and from nearest rounding with the same seeds."""
    precisions, curves = losses.files(FOLDER)
    final, rows = losses.final_losses(precisions, curves), pick(precisions)
    cells = []
    for row in rows:
        case = row["precision"]
        level, _, given = case.partition(" ")
        values = list(final[case].values())
        middle = f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        from_bf16 = losses.shown(difference(case, losses.BASE)) if given else ""
        both = given == flags(STOCHASTIC)
        from_nearest = losses.shown(difference(case, f"{level} {flags(NEAREST)}")) if both else ""
        cells.append([f"`{level}`", roundings(case)[0] if given else "", str(len(values)), middle, from_bf16, from_nearest])
    against = [f"% from {base}, 95 % interval" for base in ("BF16", NEAREST)]
    columns = ["precision", "masters and moments", "seeds", "validation loss", *against]
    return Table(columns, cells, [(precisions, rows)])


def default_loss() -> Table:
    """The difference from BF16 of each level with its default rounding: the short form of `loss`."""
    whole = loss()
    shown = [cells for cells in whole.cells if cells[1] in ("", STOCHASTIC)]
    names = ["precision", "seeds", "validation loss", "% from BF16, 95 % interval"]
    return Table(names, [[precision, *rest] for precision, _, *rest, _ in shown], whole.sources)


def tree_before(row: Row) -> str:
    """Return the commit of the tree that a row is compared with, from its command.

    Raises:
        ValueError: the command names no such tree.
    """
    words = shlex.split(row["command"])
    named = next((word for word in words if word.startswith("before=")), "")
    if not named:
        raise ValueError(
            f"{TIMES} has the command {row['command']!r} without --tree before=FOLDER: name the tree's folder after its commit"
        )
    return named.rpartition("/")[2]


def slower(level: str, quantity: str) -> float:
    """Return the change of the median `step` or `update` of a level's default from the previous tree, in percent."""
    rows = pick(TIMES, lambda row: row["quantity"] == quantity)
    before, now = ([row for row in rows if row["case"] == f"{tree} {level}"][-1] for tree in ("before", "now"))
    return 100 * (float(now["ms"]) / float(before["ms"]) - 1)


def speed() -> Table:
    """Update and whole step of each level's default, and the change from the previous tree, measured in alternation in one run."""
    rows = pick(TIMES)
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["quantity"]] = row
    cells = []
    for case, of_case in by_case.items():
        tree, level = case.split()
        before = tree == "before"
        masters, moments = (NEAREST, NEAREST) if before else roundings(level)
        shown = []
        for quantity in ("update", "step"):
            shown += [f"{float(of_case[quantity]['ms']):.2f}", "" if before else f"{slower(level, quantity):+.1f}"]
        cells.append([f"`{level}`", tree_before(of_case["step"]) if before else of_case["step"]["commit"], masters, moments, *shown])
    columns = ["level", "tree", "masters", "moments", "ms/update", "% from before", "ms/step", "% from before"]
    return Table(columns, cells, [(TIMES, rows)])


def cost() -> Sentence:
    """The cost of the default, for the pages that state speeds of O1 to O3."""
    rows = pick(TIMES, lambda row: row["quantity"] == "step")
    costs = " and ".join(f"{slower(level, 'step'):+.1f} % at {level}" for level in LEVELS)
    text = f"""The default of O1 to O3 is stochastic rounding, which changes the time of a GPT-1.3B step by {costs}, with micro-batch 4.
        Speeds of O1 to O3 were measured with nearest rounding unless a table names another."""
    return Sentence(" ".join(text.split()), [(TIMES, rows)])


def small_updates() -> Table:
    """Share of FP32's displacement that reaches the weight under a constant gradient, by weights' standard deviation and learning rate."""
    rows = pick(SMALL)
    by_case: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        by_case.setdefault((row["std"], row["lr"]), {})[f"{row['recipe']} {row['rounding']}"] = f"{float(row['share']):.2f}"
    cases = list(dict.fromkeys(f"{row['recipe']} {row['rounding']}" for row in rows))
    cells = [[std, lr, *(shares[case] for case in cases)] for (std, lr), shares in by_case.items()]
    return Table(["standard deviation", "learning rate", *cases], cells, [(SMALL, rows)])


def tuning() -> Table:
    """SmolLM2 fine-tuned and aligned with each rounding: held-out loss of the trained layers and of the export to BF16, with the paired
    differences of the exports from O0's and from nearest rounding's."""
    rows = sorted(pick(TUNING), key=lambda row: (row["task"] != "sft", row["case"] != "start", row["case"]))
    cells = []
    for task, case in dict.fromkeys((row["task"], row["case"]) for row in rows):
        own = {name: of_seeds(task, case, name) for name in ("own_loss", "bf16_loss", "own_accuracy", "bf16_accuracy")}
        means = [f"{statistics.fmean(by_seed.values()):.3f}" if by_seed else "" for by_seed in own.values()]
        level, _, given = case.partition(" ")
        from_o0 = losses.shown(tuned(task, case, "O0")) if given else ""
        from_nearest = losses.shown(tuned(task, case, f"{level} {flags(NEAREST)}")) if given == flags(STOCHASTIC) else ""
        cells.append([task.upper(), level, roundings(case)[0] if given else "", str(len(own["bf16_loss"])), *means, from_o0, from_nearest])
    judged = [f"{what}, {where}" for what in ("loss", "accuracy") for where in ("own layers", "BF16 export")]
    columns = ["task", "case", "masters and moments", "seeds", *judged, "export's loss, % from O0", "export's loss, % from nearest"]
    return Table(columns, cells, [(TUNING, rows)])


def of_seeds(task: str, case: str, name: str) -> dict[str, float]:
    """Return a column of a task's case by seed, without seeds that have no number."""
    rows = pick(TUNING, lambda row: (row["task"], row["case"]) == (task, case))
    return {row["seed"]: float(row[name]) for row in rows if row[name]}


def tuned(task: str, case: str, base: str, name: str = "bf16_loss") -> Interval:
    """Return the relative difference of a loss of two cases of a task, over the seeds that both have."""
    return paired_difference(of_seeds(task, base, name), of_seeds(task, case, name)).relative


TABLES: dict[str, Callable[[], Table | Sentence]] = {
    "rounding-loss": loss, "default-loss": default_loss, "rounding-speed": speed, "rounding-cost": cost, "rounding-tuning": tuning,
    "small-updates": small_updates,
}  # fmt: skip
