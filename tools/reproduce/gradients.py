"""Reproduce FP8-LM section 2.1 with Figures 7 and 9: gradients of a small model, summed over ranks, and relative to FP8's range."""

import csv
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from msamp.numerics.formats import E4M3, Format
from msamp.numerics.tensor import ScalingTensor
from tools.measurements import ROOT, Row
from tools.reproduce import summed_gradients
from tools.reproduce.entry import Finding, Task, training
from tools.reproduce.fig7 import STRATEGIES
from tools.reproduce.fp16_lstm import bytes_of
from tools.reproduce.sum_orders import CHAIN, ORDERS
from tools.reproduce.trainings import ENWIK8, Bytes, Loop, byte_data, loss_of, pieces

SHAPES: Mapping[str, tuple[str, str]] = {  # by size: ranks, flags of the trainer
    "toy": ("2 8", "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --train-iters 10 --lr-warmup-iters 2"),
    "small": (
        "2 8 32 128",
        "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --train-iters 100 --lr-warmup-iters 10",
    ),
    "full": ("2 4 8 16 32 64 128", ""),
}
LARGE7 = "1.3B"  # a piece of the full size, by the name of its model
# Four of its 24 blocks: the gradients of 128 ranks of all would take 600 GB.
LARGE_SHAPE7 = ("2 8 32 128", "--preset 1.3b --global-batch-size 4 --train-iters 200 --blocks 0 8 16 23")
LOOPS = {"toy": Loop(width=32, layers=1, length=16, batch=8, steps=20), "small": Loop(width=128, layers=4, length=64, batch=16, steps=200)}
SUMS = {
    "toy": (Loop(width=32, layers=1, length=8, batch=4, steps=20, warm_up=2), 1),
    "pair": (Loop(width=64, layers=2, length=64, batch=2, steps=400), 12),
    "small": (Loop(width=64, layers=2, length=32, batch=16, steps=200), 3),
}
LOWEST, HIGHEST = -48, 16  # powers of two of the histogram


# measure of fig7.py -> its name here, factor and unit
SHOWN7 = {"snr_db": ("SNR", 1.0, "dB"), "underflow_local": ("underflow, sent", 100.0, "%"), "overflow": ("overflow, reduced", 100.0, "%")}


def summed(task: Task) -> Iterator[Finding]:
    """Train on gradients that simulated ranks sum in FP8, with `tools/reproduce/summed_gradients.py`."""
    strategy, _, seed = task.piece.partition(", seed ")
    loop, _ = SUMS[task.size]
    *course, (_, valid) = summed_gradients.train(strategy, loop, bytes_of(task.text), int(seed), every=max(10, loop.steps // 20))
    yield from training(strategy, course, valid, int(seed))


def byte_flags(text: Path, folder: Path) -> list[str]:
    """Return the trainer's flags to read a text byte by byte."""
    data = byte_data(text, folder / "bytes")
    files = ["--vocab-file", f"{data}/encoder.json", "--merge-file", f"{data}/vocab.bpe"]
    return ["--train-data-path", f"{data}/train_text_document", "--tokenizer-type", "GPT2BPETokenizer", *files]


def measured_blocks(words: Sequence[str], out: Path) -> list[Row]:
    """Run fig7.py, which builds a training of its own, in its own process, and return its rows.

    Raises:
        RuntimeError: it fails; with the end of its stderr.
    """
    file = out / "fig7.csv"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.reproduce.fig7", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fig7.py {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def figure7(task: Task) -> Iterator[Finding]:
    """Measure SNR, underflow and overflow of each strategy, means over the blocks, with `tools/reproduce/fig7.py`."""
    large = task.piece == LARGE7
    ranks, flags = LARGE_SHAPE7 if large else SHAPES[task.size]
    if task.size == "full":
        data = f"--train-data-path {ENWIK8}/train_text_document --tokenizer-type GPT2BPETokenizer"
        words = f"{data} --vocab-file {ENWIK8}/encoder.json --merge-file {ENWIK8}/vocab.bpe {flags}".split()
    else:
        words = [*byte_flags(task.text, task.folder), *flags.split()]
    words += ["--commit", task.commit] if task.commit else []
    out, prefix = task.folder / (task.piece if large else task.size), f"{LARGE7}, " if large else ""
    measured = measured_blocks(["--dp", *ranks.split(), "--orders", *ORDERS, *words], out)
    seed = int(measured[0]["seed"])
    for dp in ranks.split():
        for strategy in STRATEGIES:
            blocks = _chosen(measured, dp, strategy)
            for key, (quantity, scale, unit) in SHOWN7.items():
                mean = scale * statistics.fmean(float(row[key]) for row in blocks)
                yield Finding(f"{prefix}DP {dp}, {strategy}: {quantity}", mean, unit=unit, seed=seed)
            yield Finding(f"{prefix}{strategy}, SNR (dB)", statistics.fmean(float(row["snr_db"]) for row in blocks), x=float(dp), seed=seed)
    most = ranks.split()[-1]
    for order in ORDERS:
        strategies = [strategy for strategy in STRATEGIES if _chosen(measured, most, strategy, order)]
        last = {name: statistics.fmean(float(row["snr_db"]) for row in _chosen(measured, most, name, order)) for name in strategies}
        suffix = "" if order == CHAIN else f", added as {order}"
        for strategy, snr in last.items() if order != CHAIN else ():
            yield Finding(f"{prefix}DP {most}, {strategy}{suffix}: SNR", snr, unit="dB", seed=seed)
        for rule in ("auto-paper", "auto-halve"):
            paper = "much better" if rule == "auto-paper" else None
            gain = last[rule] - max(last["pre"], last["post"])
            yield Finding(f"{prefix}{rule}{suffix}: SNR above the better of pre and post", gain, paper, "dB", seed=seed)


def _chosen(measured: Sequence[Row], dp: str, strategy: str, order: str = CHAIN) -> list[Row]:
    return [row for row in measured if (row["dp"], row["strategy"], row["order"]) == (dp, strategy, order)]


def shares(values: Tensor, fmt: Format) -> dict[str, float]:
    """Return the shares of non-zero elements that are lost below a format's range, subnormal, normal, and above the range."""
    size = values[values != 0].abs().double()
    edges = {"lost": size <= fmt.smallest / 2, "above": size > fmt.max}
    edges["subnormal"] = ~edges["lost"] & (size < fmt.tiny)
    edges["normal"] = (size >= fmt.tiny) & ~edges["above"]
    return {name: 100 * float(mask.double().mean()) for name, mask in edges.items()}


def figure9(task: Task) -> Iterator[Finding]:
    """Compare the gradients of all matrices, unscaled and scaled per tensor, with the range of E4M3."""
    loop = LOOPS[task.size]
    gradients = trained_gradients(loop, bytes_of(task.text))
    scaled = torch.cat([(g / float(ScalingTensor.quantize(g, E4M3).scale_inv)).flatten() for g in gradients])
    plain = torch.cat([g.flatten() for g in gradients])
    for name, values in (("before scaling", plain), ("after scaling", scaled)):
        for kind, share in shares(values, E4M3).items():
            yield Finding(f"{name}: {kind} in E4M3", share, unit="%", seed=1234)
        exponents = values[values != 0].abs().log2().floor().clamp(LOWEST, HIGHEST)
        for power in range(LOWEST, HIGHEST + 1):
            share = 100 * float((exponents == power).double().mean())
            yield Finding(f"{name}, % of the elements by power of two", share, x=float(power), seed=1234)


def trained_gradients(loop: Loop, text: Tensor) -> list[Tensor]:
    """Return the gradients of the matrices of a GPT on bytes after `loop.steps` steps of AdamW in FP32."""
    torch.manual_seed(1234)
    model = Bytes(loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.lr, betas=(0.9, 0.95))
    for tokens in pieces(text, loop, loop.steps + 1, 1234):
        optimizer.step()  # with the gradients of the previous piece; a no-op the first time
        optimizer.zero_grad()
        loss_of(model, dict(model.named_parameters()), tokens).backward()
    return [p.grad for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers") and p.grad is not None]
