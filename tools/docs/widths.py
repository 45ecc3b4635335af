"""Table of O3's speed relative to O0 by the width of the model: which widths gained, and which lost."""

import statistics
from collections.abc import Callable

from megatron.lm.config.presets import PRESETS
from tools.docs.cells import BENCH, REPRODUCE, Table, pick
from tools.docs.evidence import Row
from tools.docs.post import full_runs
from tools.docs.tables import H200, STEP, best_and_same_run

TUNED, LONG, LOOPS = f"{BENCH}/sft.csv", f"{REPRODUCE}/long_400m/curves.csv", f"{BENCH}/compile.csv"
BASE, ALIAS, FASTEST = "O0", "bf16", "O3"
NARROWEST = 576  # hidden size of SmolLM2-135M, whose folder and not a preset defines it
SEED = "1234"  # of the longer run: O3 has one


def speeds() -> Table:
    """Tokens/s of O0 and O3 by hidden size, each pair of one card and one way to run."""
    cells, sources = [], []
    for width, model, ran, (file, base, other), per_second in (
        (NARROWEST, "SmolLM2-135M, fine-tuning", "eager", _pair(TUNED, _tuned), _logged),
        (PRESETS["125m"]["hidden_size"], "GPT-125M", "CUDA graphs, two cards together", _pair(LONG, _long), _logged),
        (PRESETS["1.3b"]["hidden_size"], "12 layers, own loop", "eager", _pair(LOOPS, _loop), _timed),
        (PRESETS["1.3b"]["hidden_size"], "GPT-1.3B", "CUDA graphs", _summed_up(), _measured),
        (PRESETS["7b"]["hidden_size"], "GPT-7B", "CUDA graphs", _large(), _measured),
    ):
        slow, fast = per_second(base), per_second(other)
        cells.append([str(width), model, ran, f"{slow / 1000:.1f}k", f"{fast / 1000:.1f}k", f"{fast / slow:.2f}"])
        sources.append((file, [*base, *other]))
    columns = ["width", "model", "how", "`O0`, tokens/s", "`O3`, tokens/s", "times O0's speed"]
    merged = {file: [row for name, rows in sources if name == file for row in rows] for file, _ in sources}
    return Table(columns, cells, list(merged.items()))


def _pair(file: str, level: Callable[[Row], str]) -> tuple[str, list[Row], list[Row]]:
    """Return a file, its rows of O0 and its rows of O3; `level` returns the level of a row, or nothing if the row is not meant."""
    rows = full_runs(pick(file)) if file == TUNED else pick(file)
    return file, [row for row in rows if level(row) == BASE], [row for row in rows if level(row) == FASTEST]


def _tuned(row: Row) -> str:
    return row["recipe"] if row["model"] == "smollm2" else ""


def _long(row: Row) -> str:
    return row["level"] if (row["kind"], row["seed"]) == ("train", SEED) else ""


def _loop(row: Row) -> str:
    newest = [one["commit"] for one in pick(LOOPS) if one["case"] == FASTEST][-1]
    return {ALIAS: BASE}.get(row["case"], row["case"]) if row["commit"] == newest else ""


def _summed_up() -> tuple[str, list[Row], list[Row]]:
    best = {row["case"]: row for row, _ in best_and_same_run()}
    return STEP, [best[BASE]], [best[FASTEST]]


def _large() -> tuple[str, list[Row], list[Row]]:
    """Return the steps of GPT-7B that the figure of speed and memory shows."""
    wanted = (H200, "7b", "2")
    rows = pick(STEP, lambda row: (row["gpu"], row["preset"].split()[0], row["micro_batch"]) == wanted)
    best = [max((row for row in rows if row["case"] == level), key=lambda row: int(row["tokens_s_gpu"])) for level in (BASE, FASTEST)]
    return STEP, best[:1], best[1:]


def _logged(rows: list[Row]) -> float:
    return statistics.median(float(row["tokens_per_s"]) for row in rows if row["tokens_per_s"])


def _timed(rows: list[Row]) -> float:
    return statistics.median(1000 * int(row["micro_batch"]) * int(row["seq_length"]) / float(row["ms"]) for row in rows)


def _measured(rows: list[Row]) -> float:
    return float(rows[0]["tokens_s_gpu"])


TABLES: dict[str, Callable[[], Table]] = {"speed-by-width": speeds}
