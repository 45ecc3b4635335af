"""Reproduce FP8-LM's loss curves: Table 6 with Figure 8 (optimizer formats against BF16)."""

from collections.abc import Iterator, Mapping

from tools.measurements import ROOT, read
from tools.reproduce.entry import Finding, Task
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
PRECISIONS = "tools/reproduce/results/precisions/precisions.csv"
DIVERGED = {"#4": "diverges"}
COURSES: Mapping[str, tuple[int, int, str]] = {  # by size: seeds, steps, flags
    "toy": (1, 40, "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 2e-3 --eval-iters 4"),
    "small": (1, 300, "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 2e-3 --eval-iters 20"),
    "full": (3, 2000, ""),
}


def table6(task: Task) -> Iterator[Finding]:
    """Yield the curve and the last validation loss of one row and seed."""
    name, _, seed = task.piece.split()
    if task.size == "full" and name == "#0":  # recorded in the comparison of all precisions: FP32 takes longer than all other rows
        row = next(row for row in read(PRECISIONS) if row["precision"] == TABLE6[name])
        yield Finding(f"{name}, validation loss", float(row["valid_loss"]), None, "nats per token", seed=int(seed), where=row)
        return
    _, steps, flags = COURSES[task.size]
    data = byte_data(task.text, task.folder / "bytes") if task.size != "full" else ROOT / ENWIK8
    run = trained(TABLE6[name], int(seed), steps, flags, data, task.folder / task.size)
    yield Finding(f"{name}, validation loss", run.valid[-1]["loss"], DIVERGED.get(name), "nats per token", seed=int(seed))
    for line in run.train:
        yield Finding(f"{name}, training loss", line["loss"], x=line["iteration"], seed=int(seed))
