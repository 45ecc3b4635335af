"""Tables of measured steps on several cards: tensor, context, pipeline and data parallelism in the trainer, and FSDP2."""

import re
from collections.abc import Callable
from dataclasses import replace

from tools.docs.cells import BENCH, Table, case, column, kilo, newest, of, pick, speed_columns
from tools.docs.evidence import Row
from tools.docs.tables import GRID, newer_o0

FSDP = f"{BENCH}/fsdp.csv"


def shape(row: Row) -> str:
    """Return the sizes of the grid; the file has no column for context parallelism, which is a flag of the case."""
    sequences = re.search(r"--context-parallel-size (\d+)", row["case"])
    return f"{row['tp']} x {sequences[1] if sequences else 1} x {row['pp']} x {row['dp']}"


def cards(row: Row) -> str:
    """Return the number of cards and their name, and whether NCCL was kept from direct links (NCCL_P2P_DISABLE=1)."""
    name = f"{row['gpus']} x {row['gpu'].removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"
    return name if row["p2p"] == "on" else f"{name}, NCCL through host memory"


def last_of_each() -> list[Row]:
    """Return the last row of each case on the same grid of the same cards."""
    return newest(pick(GRID), "preset", "case", "tp", "pp", "dp", "gpu", "gpus", "p2p", "micro_batch", "micro_batches")


def grid() -> Table:
    """Steps of several cards, and of one card in the same calls."""
    columns = {
        "model": column("preset"), "case": case, "TP x CP x PP x DP": shape, "cards": cards, "commit": column("commit"),
        "micro-batches": lambda row: f"{row['micro_batches']} x {row['micro_batch']}", "ms/step": column("ms", 0),
        "tokens/s/GPU": kilo("tokens_s_gpu"), "peak GiB": column("peak_gib_max", 1),
        "sent GiB, Table 7's scope": column("table7_mib", 2, 1 / 1024),
        "all transfers of a layer": column("activation_mib", 2, 1 / 1024),
    }  # fmt: skip
    rows = last_of_each()
    return replace(of(GRID, rows, columns), note=newer_o0(rows))


def sharded() -> Table:
    """Steps of a plain model under FSDP2."""
    columns = {"GPUs": column("gpus"), "NVLink": column("p2p")} | speed_columns() | {"at rest GiB": column("rest_gib", 1)}
    return of(FSDP, newest(pick(FSDP), "case", "gpus", "p2p", "micro_batch"), columns)


TABLES: dict[str, Callable[[], Table]] = {"grids": grid, "fsdp": sharded}
