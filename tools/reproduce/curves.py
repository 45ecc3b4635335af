"""Reproduce FP8-LM's loss curves: Table 6 with Figure 8 (optimizer formats against BF16) and Figure 4 (levels against BF16)."""

from collections.abc import Iterator, Mapping, Sequence

from tools.measurements import ROOT, read
from tools.reproduce import recorded
from tools.reproduce.compare_precisions import FIRST_SEED
from tools.reproduce.entry import Finding, Task
from tools.reproduce.recorded import REPRODUCE
from tools.reproduce.trainings import ENWIK8, byte_data, trained

# FP8-LM Table 6. Ours: the level with its four formats; each row changes one.
TABLE6 = {
    "#0": "fp32",
    "#1": "bf16",
    "#2a": "O2",
    "#2b": "O2 --master-format bf16",
    "#3": "O2 --master-format fp8-e4m3",
    "#4": "O2 --exp-avg-sq-format fp8-e4m3",
}
DIVERGED = {"#4": "diverges"}
COURSES: Mapping[str, tuple[int, int, str]] = {  # by size: seeds, steps, flags
    "toy": (1, 40, "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 2e-3 --eval-iters 4"),
    "small": (1, 300, "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 2e-3 --eval-iters 20"),
    "full": (3, 2000, ""),
}
# Model -> folder that `compare_precisions.py` wrote; of the twelve seeds only the first has its training losses on file.
MODELS4 = {"125M": f"{REPRODUCE}/seeds_125m", "125M, all levels": f"{REPRODUCE}/precisions", "1.3B": recorded.LARGE}
LEVELS4 = ("O1", "O2", "O3")
NEAREST = "O3 --master-rounding nearest --moment-rounding nearest"  # the paper's rounding, with today's layers
NEAREST4 = f"{REPRODUCE}/nearest_125m"
SHARDED = "O3 --micro-batch-size 1"  # eight micro-batches per step and rank
# gradients summed over the ranks in FP32, by NCCL in E4M3, and accumulated over micro-batches in FP8
SUMS2 = (SHARDED, f"{SHARDED} --grad-exchange nccl", f"{SHARDED} --grad-accum-dtype fp8-sr")


def table6(task: Task) -> Iterator[Finding]:
    """Yield the curve and the last validation loss of one row and seed."""
    name, _, seed = task.piece.split()
    if task.size == "full" and name == "#0":  # recorded in the comparison of all precisions: FP32 takes longer than all other rows
        row = recorded.row_of(TABLE6[name])
        yield Finding(f"{name}, validation loss", float(row["valid_loss"]), None, "nats per token", seed=int(seed), where=row)
        return
    _, steps, flags = COURSES[task.size]
    data = byte_data(task.text, task.folder / "bytes") if task.size != "full" else ROOT / ENWIK8
    run = trained(TABLE6[name], int(seed), steps, flags, data, task.folder / task.size)
    yield Finding(f"{name}, validation loss", run.valid[-1]["loss"], DIVERGED.get(name), "nats per token", seed=int(seed))
    for line in run.train:
        yield Finding(f"{name}, training loss", line["loss"], x=line["iteration"], seed=int(seed))


def figure4(task: Task) -> Iterator[Finding]:
    """Compare O0 with the levels of each recorded model: last validation losses at the same seeds, and training losses of the first
    seed."""
    for model, folder in MODELS4.items():
        precisions, curves = recorded.files(folder)
        rows = recorded.by_precision(precisions)
        yield from _last_losses(model, folder, LEVELS4)
        base = rows[recorded.BASE]
        seeds = 100 * (float(base["most"]) - float(base["least"])) / float(base["valid_loss"])
        yield Finding(f"{model}: range of BF16's own seeds", seeds, unit="%", where=base)
        if model != "125M, all levels":  # whose curves are in the comparison of all precisions
            for row in (row for row in read(curves) if row["kind"] == "train" and row["run"].endswith("_0")):
                level = row["run"].removesuffix("_0")
                quantity = f"{level}, {model}, training loss by tokens"
                yield Finding(quantity, float(row["loss"]), x=float(row["tokens"]), seed=FIRST_SEED, where=rows[level])


def _last_losses(model: str, folder: str, levels: Sequence[str]) -> Iterator[Finding]:
    """Yield the last validation losses of BF16 and of those levels that a folder has, and the levels' paired differences from BF16."""
    precisions, curves = recorded.files(folder)
    rows, final = recorded.by_precision(precisions), recorded.final_losses(precisions, curves)
    for level in (recorded.BASE, *(level for level in levels if level in rows)):
        for seed, loss in final[level].items():
            yield Finding(f"{level} at {model}: validation loss", loss, unit="nats per token", seed=seed, where=rows[level])
        if level != recorded.BASE:
            above = recorded.paired(level, recorded.BASE, precisions, curves).relative
            quantity = f"{level}, {model}: validation loss above BF16's, "
            yield Finding(quantity + "mean of the seeds", 100 * above.mean, 0.0, "%", where=rows[level])
            if above.half_width is not None:
                yield Finding(quantity + "half width of the 95 % interval", 100 * above.half_width, unit="%", where=rows[level])


def two_ranks(task: Task) -> Iterator[Finding]:
    """Compare O0 with O3 over two data-parallel ranks with ZeRO, by how gradients are summed."""
    yield from _last_losses("two ranks", recorded.TWO_RANKS, SUMS2)


def nearest4(task: Task) -> Iterator[Finding]:
    """Compare O0 with O3 whose masters and moments are rounded to nearest, as the paper's are."""
    yield from _last_losses("125M", NEAREST4, (NEAREST,))
