"""Recorded losses, as several entries read them: by precision and seed, and paired with a baseline."""

from megatron.lm.evaluation.paired_difference import PairedDifference, paired_difference
from tools.measurements import Row, read
from tools.reproduce.compare_precisions import FIRST_SEED, folder_of

BENCH, REPRODUCE = "tools/bench/results", "tools/reproduce/results"
PREDICTED = f"{REPRODUCE}/planner.csv"
PRECISIONS, CURVES = f"{REPRODUCE}/precisions/precisions.csv", f"{REPRODUCE}/precisions/curves.csv"
LARGE, TWO_RANKS = f"{REPRODUCE}/precisions_1.3b", f"{REPRODUCE}/dp2_125m"  # folders with files of the same form
ENCODERS = f"{BENCH}/encoders.csv"
BASE = "bf16"  # the baseline in comparisons of precisions


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
