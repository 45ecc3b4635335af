"""Reproduce FP8-LM's loss curves: Table 6 with Figure 8 (optimizer formats against BF16) and Figure 4 (levels against BF16)."""

from collections.abc import Iterator, Mapping, Sequence

from tools.docs import losses
from tools.docs.cells import REPRODUCE
from tools.docs.evidence import ROOT, read
from tools.reproduce.compare_precisions import FIRST_SEED
from tools.reproduce.entry import Axes, Entry, Finding, Needs, Task
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
MODELS4 = {"125M": f"{REPRODUCE}/seeds_125m", "125M, all levels": f"{REPRODUCE}/precisions", "1.3B": losses.LARGE}
LEVELS4 = ("O1", "O2", "O3")
NEAREST = "O3 --master-rounding nearest --moment-rounding nearest"  # the paper's rounding, with today's layers
NEAREST4 = f"{REPRODUCE}/nearest_125m"
ONE_RANK = (
    "Every run had one data-parallel rank and one micro-batch per step: gradients were cast to FP8 and never summed in FP8. Sums of two "
    "ranks are under fp8lm-two-ranks; the loss with sums of many ranks or with tensor parallelism was not measured."
)
SHARDED = "O3 --micro-batch-size 1"  # eight micro-batches per step and rank
# gradients summed over the ranks in FP32, by NCCL in E4M3, and accumulated over micro-batches in FP8
SUMS2 = (SHARDED, f"{SHARDED} --grad-exchange nccl", f"{SHARDED} --grad-accum-dtype fp8-sr")


def table6_pieces(size: str) -> Sequence[str]:
    """Return one piece per row and seed, the first seed of all rows first. FP32 has one seed at full size, the recorded one."""
    seeds = range(1234, 1234 + COURSES[size][0])
    return [f"{row} seed {seed}" for seed in seeds for row in TABLE6 if row != "#0" or seed == seeds[0]]


def table6(task: Task) -> Iterator[Finding]:
    """Yield the curve and the last validation loss of one row and seed."""
    name, _, seed = task.piece.split()
    if task.size == "full" and name == "#0":  # recorded in the comparison of all precisions: FP32 takes longer than all other rows
        row = losses.row_of(TABLE6[name])
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
        precisions, curves = losses.files(folder)
        rows = losses.by_precision(precisions)
        yield from _last_losses(model, folder, LEVELS4)
        base = rows[losses.BASE]
        seeds = 100 * (float(base["most"]) - float(base["least"])) / float(base["valid_loss"])
        yield Finding(f"{model}: range of BF16's own seeds", seeds, unit="%", where=base)
        if model != "125M, all levels":  # whose curves are in the comparison of all precisions
            for row in (row for row in read(curves) if row["kind"] == "train" and row["run"].endswith("_0")):
                level = row["run"].removesuffix("_0")
                quantity = f"{level}, {model}, training loss by tokens"
                yield Finding(quantity, float(row["loss"]), x=float(row["tokens"]), seed=FIRST_SEED, where=rows[level])


def _last_losses(model: str, folder: str, levels: Sequence[str]) -> Iterator[Finding]:
    """Yield the last validation losses of BF16 and of those levels that a folder has, and the levels' paired differences from BF16."""
    precisions, curves = losses.files(folder)
    rows, final = losses.by_precision(precisions), losses.final_losses(precisions, curves)
    for level in (losses.BASE, *(level for level in levels if level in rows)):
        for seed, loss in final[level].items():
            yield Finding(f"{level} at {model}: validation loss", loss, unit="nats per token", seed=seed, where=rows[level])
        if level != losses.BASE:
            above = losses.paired(level, losses.BASE, precisions, curves).relative
            quantity = f"{level}, {model}: validation loss above BF16's, "
            yield Finding(quantity + "mean of the seeds", 100 * above.mean, 0.0, "%", where=rows[level])
            if above.half_width is not None:
                yield Finding(quantity + "half width of the 95 % interval", 100 * above.half_width, unit="%", where=rows[level])


def two_ranks(task: Task) -> Iterator[Finding]:
    """Compare O0 with O3 over two data-parallel ranks with ZeRO, by how gradients are summed."""
    yield from _last_losses("two ranks", losses.TWO_RANKS, SUMS2)


def nearest4(task: Task) -> Iterator[Finding]:
    """Compare O0 with O3 whose masters and moments are rounded to nearest, as the paper's are."""
    yield from _last_losses("125M", NEAREST4, (NEAREST,))


GPU = Needs(gpus=1, gib=80, minutes=60, files=(ENWIK8,))
ENTRIES = (
    Entry(
        name="fp8lm-table6",
        axes=Axes(y="training loss, nats per token", log="y"),
        title="FP8-LM, Table 6 and Figure 8",
        claim="The master weight needs 16 bits and the second moment FP16: #2a matches #0 and #1, and #4 diverges.",
        run=table6,
        sizes={"toy": Needs(minutes=1), "small": Needs(minutes=20, text=True), "full": GPU},
        pieces=table6_pieces,
        reason=f"#0, FP32, has one seed, from an earlier commit: it takes longer than all others together. {ONE_RANK}",
        headline="#4, validation loss",
        same_loss=(("#1, validation loss", "#2a, validation loss"),),
        apart=True,
        slow=True,
    ),
    Entry(
        name="fp8lm-figure4",
        axes=Axes("tokens"),
        title="FP8-LM, Figure 4",
        claim="The training loss in FP8 matches BF16's, from 7B to 175B.",
        run=figure4,
        sizes={"kept": Needs(files=tuple(file for folder in MODELS4.values() for file in losses.files(folder)), computed=True)},
        headline="O3, 125M: validation loss above BF16's, mean of the seeds",
        reason=f"Only GPT-125M and 300 steps of GPT-1.3B were measured; 7B and more need a cluster. {ONE_RANK}",
        same_loss=tuple(
            (f"bf16 at {model}: validation loss", f"{level} at {model}: validation loss")
            for model, level in (("125M", "O3"), *(("125M, all levels", level) for level in LEVELS4), ("1.3B", "O3"))
        ),
    ),
    Entry(
        name="fp8lm-two-ranks",
        title="FP8-LM, FP8 gradients of two ranks",
        claim="8-bit gradients, summed over data-parallel ranks and sharded as in ZeRO, keep the accuracy of the model.",
        run=two_ranks,
        sizes={"kept": Needs(files=losses.files(losses.TWO_RANKS), computed=True)},
        headline=f"{SHARDED}, two ranks: validation loss above BF16's, mean of the seeds",
        reason="GPT-125M, 800 steps of 8,192 tokens on two cards, eight micro-batches per rank at O3. Two ranks have one addition per "
        "element; the paper has up to 128.",
        same_loss=tuple(("bf16 at two ranks: validation loss", f"{case} at two ranks: validation loss") for case in SUMS2),
    ),
    Entry(
        name="fp8lm-figure4-nearest",
        title="FP8-LM, Figure 4, rounded to nearest",
        claim="The training loss in FP8 matches BF16's where masters and moments are rounded to nearest, as the paper does.",
        run=nearest4,
        sizes={"kept": Needs(files=losses.files(NEAREST4), computed=True)},
        headline=f"{NEAREST}, 125M: validation loss above BF16's, mean of the seeds",
        reason=f"GPT-125M, one epoch of enwik8. {ONE_RANK}",
        same_loss=(("bf16 at 125M: validation loss", f"{NEAREST} at 125M: validation loss"),),
    ),
)
