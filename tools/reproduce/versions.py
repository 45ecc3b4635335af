"""Compare the two versions of FP8-LM: the numbers of its Table 5 that changed, and ours next to the first version's.

The seeds of this project hold a translation of the first version (October 2023). Other pages compare the second version.
"""

from collections.abc import Iterator, Mapping

from tools.measurements import read
from tools.reproduce import grids
from tools.reproduce.entry import NOT_MEASURED, Finding, Task
from tools.reproduce.recorded import PREDICTED

COLUMNS = ("memory, GB", "samples per second", "TFLOPS", "MFU, %", "share of a step in weight-related communication, %", "volume, GB")
Rows = Mapping[tuple[str, int], tuple[float, ...]]  # (precision, micro-batch) -> `COLUMNS`
FIRST: Mapping[str, Rows] = {
    "7b": {
        ("BF16", 2): (69.6, 158.1, 442, 44.7, 9.2, 37.2),
        ("TE", 2): (77.2, 219.4, 613, 31.0, 9.5, 37.2),
        ("FP8", 2): (50.8, 196.2, 547, 27.6, 6.3, 13.9),
        ("FP8", 4): (69.0, 215.6, 602, 30.4, 8.3, 13.9),
    },
    "13b": {
        ("BF16", 2): (68.4, 78.2, 415, 42.0, 11.4, 34.3),
        ("TE", 2): (73.8, 111.8, 593, 30.0, 7.9, 34.3),
        ("FP8", 2): (47.7, 99.3, 498, 25.9, 5.8, 12.4),
        ("FP8", 4): (65.4, 113.1, 600, 30.3, 6.7, 12.4),
    },
    "175b": {
        ("BF16", 1): (63.4, 22.5, 388, 39.2, 8.8, 23.4),
        ("TE", 1): (66.7, 31.4, 541, 27.3, 4.3, 23.4),
        ("FP8", 1): (36.8, 24.3, 418, 21.1, 1.6, 8.2),
        ("FP8", 4): (52.3, 36.8, 634, 32.0, 8.9, 8.2),
    },
}
SECOND: Mapping[str, Rows] = {
    "7b": {
        ("BF16", 2): (69.6, 159.2, 445, 45.0, 10.1, 37.2),
        ("TE", 2): (77.3, 224.5, 627, 31.7, 9.7, 37.2),
        ("FP8", 2): (49.4, 219.8, 615, 31.1, 7.9, 13.9),
        ("FP8", 4): (69.3, 230.5, 645, 32.6, 10.4, 13.9),
    },
    "13b": {
        ("BF16", 2): (68.2, 79.3, 420, 42.5, 11.1, 34.3),
        ("TE", 2): (76.4, 111.7, 592, 29.9, 7.1, 34.3),
        ("FP8", 2): (48.9, 109.5, 575, 29.1, 3.9, 12.4),
        ("FP8", 4): (67.8, 121.5, 644, 32.5, 9.3, 12.4),
    },
    "175b": {
        ("BF16", 1): (66.1, 22.4, 386, 39.0, 8.8, 23.4),
        ("TE", 1): (69.6, 28.7, 493, 24.9, 3.9, 23.4),
        ("FP8", 1): (40.3, 27.1, 473, 23.9, 2.5, 8.2),
        ("FP8", 4): (57.7, 39.3, 677, 34.2, 10.9, 8.2),
    },
}
# RLHF (Table 4) in MB, in both versions: weights of BF16 and FP8, optimizer states of BF16 and FP8.
RLHF = (15082.0, 10292.0, 15116.0, 5669.0)
WEIGHTS_IN_WORDS = {"first": -46.0, "second": -32.0}  # what each version's introduction says of the weights, %


def compared(task: Task) -> Iterator[Finding]:
    """Yield how far the versions are apart, and ours next to the first."""
    pairs = [
        (name, first, second)
        for model, rows in FIRST.items()
        for row, values in rows.items()
        for name, first, second in zip(COLUMNS, values, SECOND[model][row], strict=True)
    ]
    yield Finding("numbers of Table 5 that the second version changed", float(sum(first != second for _, first, second in pairs)))
    yield Finding("numbers of Table 5", float(len(pairs)))
    for column in COLUMNS:
        change = max((second / first - 1 for name, first, second in pairs if name == column), key=abs)
        yield Finding(f"{column}: largest change, second version from first", 100 * change, unit="%")
    for version, table in (("first", FIRST), ("second", SECOND)):
        for model, rows in table.items():
            yield from _gains(version, model, rows)
    weights, states = (100 * (RLHF[at + 1] / RLHF[at] - 1) for at in (0, 2))
    for version, said in WEIGHTS_IN_WORDS.items():
        yield Finding(f"RLHF, weights: Table 4 of both versions, and the introduction of the {version}", weights, said, "%")
    yield Finding("RLHF, optimizer states: Table 4 of both versions, and the introduction of both", states, -62.0, "%")


def _gains(version: str, model: str, rows: Rows) -> Iterator[Finding]:
    """Yield what FP8 gains in a version's rows of a model, next to the dry run's memory and the planner's speed."""
    (_, same), base = next(iter(rows)), next(iter(rows.values()))
    te, fp8, largest = rows["TE", same], rows["FP8", same], rows["FP8", 4]
    memory = {name: grids.fullest(grids.configuration(model, level), grids.GRIDS[model]) for name, level in grids.LEVELS.items()}
    speed = {
        (grids.PRECISIONS5[row["precision"]], int(row["micro_batch"])): float(row["samples_s"])
        for row in read(PREDICTED)
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
