"""Reproduce FP8-LM's loss curves: Table 6 with Figure 8 (optimizer formats against BF16), and two processes that share a model."""

from collections.abc import Iterator, Mapping

from tools.bench.rows import machine
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


# What two processes share, and the flags of all its runs, 8,192 tokens per step; EP 1: one process with the flags of EP 2, the whole model.
_SHORT = "--global-batch-size 16 --seq-length 512 "
_EXPERTS = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-ffn-hidden-size 1024 --swiglu --disable-bias-linear "
)
SHARED = {
    "TP 2 + SP": f"{_SHORT} --micro-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel",
    "PP 2": f"{_SHORT} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
    "CP 2": "--global-batch-size 1 --micro-batch-size 1 --seq-length 8192 --max-position-embeddings 8192 --num-attention-heads 6 "
    "--context-parallel-size 2",
    "EP 2": f"{_EXPERTS} --micro-batch-size 2 --expert-model-parallel-size 2",
    "EP 1": _EXPERTS,
}
SPLIT_COURSES = {  # by size: steps, flags
    "toy": (8, "--hidden-size 24 --kv-channels 16 --num-attention-heads 6 --seq-length 32 --max-position-embeddings 32 --eval-iters 1"),
    "full": (800, ""),
}


def split(task: Task) -> Iterator[Finding]:
    """Yield the curve and the last validation loss of one precision, one way to share the model, and one seed."""
    case, shared, seed = task.piece.replace("seed ", "").split(", ")
    (steps, flags), where, processes = SPLIT_COURSES[task.size], machine(task.commit), 1 if shared == "EP 1" else 2
    data = byte_data(task.text, task.folder / "bytes") if task.size == "toy" else ROOT / ENWIK8
    run = trained(case, int(seed), steps, f"{SHARED[shared]} {flags}", data, task.folder / task.size / shared, processes)
    where["gpu"] = f"{processes} x {where['gpu']}" if processes > 1 else where["gpu"]
    yield Finding(f"{case} at {shared}: validation loss", run.valid[-1]["loss"], unit="nats per token", seed=int(seed), where=where)
    for line in run.train:
        yield Finding(f"{case}, {shared}, training loss", line["loss"], x=line["tokens"], seed=int(seed), where=where)
