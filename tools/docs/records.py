"""The records: for each model and card the fastest and the leanest measured step of ours, with the command that repeats it."""

import re
from collections.abc import Callable, Iterator

from tools.bench.check_plan import EARLIER
from tools.docs.cells import BENCH, MARK, PRECISIONS, Table, pick
from tools.docs.evidence import Row, marked
from tools.docs.tables import ALIAS, BASE, newer_o0

STEP, GRID = f"{BENCH}/step.csv", f"{BENCH}/grid.csv"
MODELS = {
    "1.3b": "GPT-1.3B, sequence 2,048",
    "7b": "GPT-7B, sequence 2,048",
    "13b": "GPT-13B, sequence 2,048",
    "llama2-7b --seq-length 2048": "Llama-2-7B, sequence 2,048",
    "llama3-8b --seq-length 8192": "Llama-3-8B, sequence 8,192",
}
LOSSES = "python tools/reproduce/compare_precisions.py --data data/enwik8 --out runs/losses"
PEERS = ("megatron", "torchao", "llama ", "te-", "bf16")


def model(row: Row) -> str | None:
    """Return the model of a row by its name in `MODELS`; None for others, such as some layers of one."""
    return MODELS.get(re.sub(r" --(fp8-min-gain|vocab-size) \S+", "", row["preset"]).strip())


def measured() -> Iterator[tuple[str, Row]]:
    """Yield file and row of every measured step of a whole model by our levels, without the first trees, which ran eagerly and unfused."""
    for name in (STEP, GRID):
        for row in pick(name):
            ours = not row["case"].startswith(PEERS) and "(" not in row["case"] and row["commit"] not in EARLIER
            if ours and model(row) and row["ms"] and row["tokens_s_gpu"]:
                yield name, row


def cards(row: Row) -> tuple[int, str]:
    """Return the number of cards and their name."""
    return int(row["gpus"]), row["gpu"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def peak(row: Row) -> float:
    """Return the peak of the fullest process in GiB."""
    return float(row.get("peak_gib") or row["peak_gib_max"])


def command(name: str, row: Row) -> str:
    """Return the command that repeats a row."""
    preset, _, more = row["preset"].partition(" ")
    own = " ".join(re.findall(r"--vocab-size \S+", more))  # a flag of the tool
    more = " ".join(re.sub(r"--vocab-size \S+", "", more).split())
    flags = " ".join(filter(None, (f"--preset {preset} --micro-batch-size {row['micro_batch']}", own, f'--flags="{more}"' if more else "")))
    if name == STEP:
        return f'python tools/bench/bench_step.py {flags} --levels "{row["case"]}"'
    tool = f"torchrun --nproc-per-node {row['gpus']} tools/bench/bench_grid.py"
    return f'{tool} {flags} --micro-batches {row["micro_batches"]} --cases "{row["case"]}"'


def records() -> Table:
    """For each model and number of cards: the fastest and the leanest step, and the fastest of BF16."""
    groups: dict[tuple[str, tuple[int, str]], list[tuple[str, Row]]] = {}
    for name, row in measured():
        groups.setdefault((str(model(row)), cards(row)), []).append((name, row))
    cells, used = [], []
    order = list(MODELS.values())
    for (of_model, (count, card)), entries in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        ours = [one for one in entries if one[1]["case"].split()[0] != BASE]
        bf16 = [one for one in entries if one not in ours]
        best: dict[str, tuple[str, Row]] = {}
        if ours:
            best["fastest"] = max(ours, key=lambda one: float(one[1]["tokens_s_gpu"]))
            best["leanest"] = min(ours, key=lambda one: peak(one[1]))
        if bf16:
            best["fastest, BF16"] = max(bf16, key=lambda one: float(one[1]["tokens_s_gpu"]))
        for what, (name, row) in best.items():
            used.append((name, row))
            mark = MARK if marked(row) else ""
            numbers = [f"{int(row['tokens_s_gpu']):,}", f"{peak(row):.1f}", row["commit"], row["date"]]
            cells.append([of_model + mark, f"{count} x {card}", what, *numbers, f"`{command(name, row)}`"])
    columns = ["model", "cards", "record", "tokens/s per card", "peak GiB", "commit", "date", "command"]
    sources = [(file, [row for name, row in used if name == file]) for file in (STEP, GRID)]
    return Table(columns, cells, sources, note=newer_o0([row for _, row in used]))


def losses() -> Table:
    """The lowest validation loss of GPT-125M on one epoch of enwik8 among precisions with several seeds, and BF16's, on each card."""
    rows = [row for row in pick(PRECISIONS) if int(row["seeds"]) > 1]
    cells, used = [], []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        alike = [row for row in rows if row["gpu"] == gpu]
        best = min((row for row in alike if row["precision"] != ALIAS), key=lambda row: float(row["valid_loss"]))
        for what, row in (("lowest", best), ("BF16", next((row for row in alike if row["precision"] == ALIAS), None))):
            if row is not None:
                used.append(row)
                name = row["precision"]
                command = f"{LOSSES} --precisions {ALIAS} {best['precision']}"
                seeds = " ".join(f"{one}={row['seeds']}" for one in (ALIAS, best["precision"]))
                numbers = [row["valid_loss"], f"{row['least']} to {row['most']}", row["seeds"], row["commit"], row["date"]]
                model = "GPT-125M, 16M tokens of enwik8" + (MARK if marked(row) else "")
                cells.append([model, f"1 x {cards({**row, 'gpus': '1'})[1]}", what, f"`{name}`", *numbers, f"`{command} --seeds {seeds}`"])
    columns = ["model", "cards", "record", "precision", "loss, mean", "of the seeds", "seeds", "commit", "date", "command"]
    return Table(columns, cells, [(PRECISIONS, used)])


TABLES: dict[str, Callable[[], Table]] = {"records": records, "record-losses": losses}
