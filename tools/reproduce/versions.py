"""Compare the two versions of FP8-LM: the numbers of its Table 5 that changed, and ours next to the first version's.

The seeds of this project hold a translation of the first version (October 2023). Other pages compare the second version.
"""

from collections.abc import Iterator, Mapping, Sequence

from tools.measurements import read
from tools.reproduce import grids
from tools.reproduce.entry import NOT_MEASURED, Finding, Task, paper

COLUMNS = ("memory, GB", "samples per second", "TFLOPS", "MFU, %", "share of a step in weight-related communication, %", "volume, GB")
WEIGHTS_IN_WORDS = {"first": -46.0, "second": -32.0}  # what each version's introduction says of the weights, %


def compared(task: Task) -> Iterator[Finding]:
    """Yield how far the versions are apart, and ours next to the first."""
    pairs = [
        (name, first, second)
        for model, rows in paper("fp8lm.table5.first").items()
        for row, values in rows.items()
        for name, first, second in zip(COLUMNS, values, paper("fp8lm.table5.second")[model][row], strict=True)
    ]
    yield Finding("numbers of Table 5 that the second version changed", float(sum(first != second for _, first, second in pairs)))
    yield Finding("numbers of Table 5", float(len(pairs)))
    for column in COLUMNS:
        change = max((second / first - 1 for name, first, second in pairs if name == column), key=abs)
        yield Finding(f"{column}: largest change, second version from first", 100 * change, unit="%")
    for version in ("first", "second"):
        for model, rows in paper(f"fp8lm.table5.{version}").items():
            yield from _gains(version, model, rows)
    rlhf = paper("fp8lm.table4")
    weights, states = (100 * (rlhf[at + 1] / rlhf[at] - 1) for at in (0, 2))
    for version, said in WEIGHTS_IN_WORDS.items():
        yield Finding(f"RLHF, weights: Table 4 of both versions, and the introduction of the {version}", weights, said, "%")
    yield Finding("RLHF, optimizer states: Table 4 of both versions, and the introduction of both", states, -62.0, "%")


def _gains(version: str, model: str, rows: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Yield FP8's memory saving and speed-up in a version's rows of a model, with the dry run's and the planner's values."""
    same, base = int(next(iter(rows)).split()[1]), next(iter(rows.values()))
    te, fp8, largest = rows[f"TE {same}"], rows[f"FP8 {same}"], rows["FP8 4"]
    memory = {name: grids.fullest(grids.configuration(model, level), grids.GRIDS[model]) for name, level in grids.LEVELS.items()}
    speed = {
        (grids.PRECISIONS5[row["precision"]], int(row["micro_batch"])): float(row["samples_s"])
        for row in read(grids.PREDICTED)
        if (row["what"], row["model"]) == ("table5", model)
    }
    prefix = f"{version} version, {model}: "
    yield Finding(prefix + "memory saved by FP8", 100 * (1 - memory["FP8"] / memory["BF16"]), 100 * (1 - fp8[0] / base[0]), "%")
    yield Finding(prefix + "memory saved against TE", NOT_MEASURED, 100 * (1 - fp8[0] / te[0]), "%")
    for micro_batch, row in ((same, fp8), (4, largest)):
        ours = 100 * (speed["FP8", micro_batch] / speed["BF16", same] - 1)
        yield Finding(
            f"{prefix}more samples per second in FP8, micro-batch {micro_batch}; ours predicted", ours, 100 * (row[1] / base[1] - 1), "%"
        )
    yield Finding(prefix + "more samples per second than TE, micro-batch 4", NOT_MEASURED, 100 * (largest[1] / te[1] - 1), "%")
