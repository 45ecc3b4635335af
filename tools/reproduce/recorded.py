"""Recorded losses and post-training runs, as several entries read them: by precision and seed, and paired with a baseline."""

from collections.abc import Sequence

from megatron.lm.evaluation.paired_difference import Interval, PairedDifference, paired_difference
from tools.measurements import Row, read
from tools.reproduce.compare_precisions import FIRST_SEED, folder_of

BENCH, REPRODUCE = "tools/bench/results", "tools/reproduce/results"
PREDICTED = f"{REPRODUCE}/planner.csv"
PRECISIONS, CURVES = f"{REPRODUCE}/precisions/precisions.csv", f"{REPRODUCE}/precisions/curves.csv"
LARGE, TWO_RANKS = f"{REPRODUCE}/precisions_1.3b", f"{REPRODUCE}/dp2_125m"  # folders with files of the same form
TUNING, CONTINUED = f"{REPRODUCE}/rounding/tuning.csv", f"{REPRODUCE}/smollm2/continued.csv"
SFT, DPO, PPO, ENCODERS, BOOLQ, EVALUATION, POST_CURVES = (
    f"{BENCH}/{name}.csv" for name in ("sft", "dpo", "ppo", "encoders", "boolq", "evaluation", "post_curves")
)
BASE, BF16_LEVEL = "bf16", "O0"  # the baseline in comparisons of precisions and of levels
RUN = ("model", "recipe", "dtype", "seq_length", "global_batch_size", "steps", "seed")  # what tells runs of fine-tuning apart


def final_losses(precisions: str = PRECISIONS, curves: str = CURVES) -> dict[str, dict[int, float]]:
    """Return the last validation loss of every precision by seed, in nats per token, including those with one seed."""
    names = {folder_of(row["precision"]): row["precision"] for row in read(precisions)}
    evaluations = sorted((row for row in read(curves) if row["kind"] == "valid"), key=lambda row: int(row["iteration"]))
    last = {row["run"]: row for row in evaluations}
    by_precision: dict[str, dict[int, float]] = {}
    for run, row in last.items():
        folder, _, number = run.rpartition("_")
        if folder in names:
            by_precision.setdefault(names[folder], {})[FIRST_SEED + int(number)] = float(row["loss"])
    return by_precision


def paired(precision: str, base: str = BASE, precisions: str = PRECISIONS, curves: str = CURVES) -> PairedDifference:
    """Compare the last validation losses of two precisions, over the seeds that both have.

    Raises:
        ValueError: they have no seed in common, or one has no run.
    """
    losses = final_losses(precisions, curves)
    missing = [name for name in (precision, base) if name not in losses]
    if missing:
        raise ValueError(f"{curves} has no run of {missing[0]}, only of {', '.join(losses)}: compare_precisions.py creates it")
    common = {seed: loss for seed, loss in losses[precision].items() if seed in losses[base]}
    return paired_difference(losses[base], common)


def files(folder: str) -> tuple[str, str]:
    """Return the files of a comparison of precisions in a folder: rows and curves."""
    return f"{folder}/precisions.csv", f"{folder}/curves.csv"


def by_precision(file: str = PRECISIONS) -> dict[str, Row]:
    """Return the rows of a comparison of precisions."""
    return {row["precision"]: row for row in read(file)}


def row_of(precision: str) -> Row:
    """Return the row of a precision in the comparison of all.

    Raises:
        ValueError: there is none.
    """
    rows = by_precision()
    if precision not in rows:
        raise ValueError(f"{PRECISIONS} has no row of {precision}, only of {', '.join(rows)}: compare_precisions.py creates it")
    return rows[precision]


def newest_runs(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the rows of the newest commit and card of each value under `key`, such as each model."""
    last = {row[key]: (row["commit"], row["gpu"]) for row in rows}
    return [row for row in rows if (row["commit"], row["gpu"]) == last[row[key]]]


def without_lora(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of fine-tuning that trained all weights."""
    return [row for row in rows if not int(row.get("lora_rank") or 0)]


def full_runs(rows: Sequence[Row]) -> list[Row]:
    """Return the newest runs of each model that trained all weights; of several of a seed the last."""
    newest = newest_runs(without_lora(rows), "model")
    return list({tuple(row.get(key) for key in RUN): row for row in newest}.values())


def of_seeds(task: str, case: str, name: str) -> dict[str, float]:
    """Return a column of a task's case by seed, without seeds that have no number."""
    rows = [row for row in read(TUNING) if (row["task"], row["case"]) == (task, case)]
    return {row["seed"]: float(row[name]) for row in rows if row[name]}


def tuned(task: str, case: str, base: str, name: str = "bf16_loss") -> Interval:
    """Return the relative difference of a loss of two cases of a task, over the seeds that both have."""
    return paired_difference(of_seeds(task, base, name), of_seeds(task, case, name)).relative
