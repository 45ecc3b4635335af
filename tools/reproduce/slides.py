"""Reproduce the slides on mixed precision: detector, language model, weight copies, overflow, and the speed of Tensor Cores."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from megatron.lm.evaluation.paired_difference import interval
from msamp.fp16.opt_level import by_name
from tools.bench.bench_kernels import times as launched
from tools.reproduce import fp16_amp, fp16_classifier, fp16_lstm
from tools.reproduce.entry import Finding, Task, paper
from tools.reproduce.fp16_lstm import bytes_of, table
from tools.reproduce.trainings import Bytes, Loop, pieces

DETECTOR_STEPS = {"toy": 4, "small": 300}
LSTM = {"toy": "tiny", "small": "toy", "full": "full"}
CLASSIFIERS = {"toy": (3, 8, 2), "small": (1500, 128, 8)}  # steps, width, seeds
GPTS = {
    "toy": Loop(width=32, layers=1, length=16, batch=4, steps=4, warm_up=2),
    "small": Loop(width=64, layers=2, length=32, batch=16, steps=400),
}
SHAPES = ((512, 512), (2048, 2048), (4096, 4096), (8192, 8192), (4095, 4095))  # the last is not a multiple of 8
REPEATS = 20


def numbers(task: Task) -> Iterator[Finding]:
    """Compare the intervals of FP16's numbers with the slides' table, and where values become 0 and infinity."""
    wrong = 0
    for exponent in range(-14, 16):
        low = 0.0 if exponent == -14 else 2.0**exponent  # subnormal numbers, and normal ones up to 2^-13, have one interval
        high = min(2.0 ** (exponent + 1), 65504.0)
        codes = torch.tensor([low, high], dtype=torch.float16).view(torch.int16)
        steps = torch.arange(int(codes[0]), int(codes[1]) + 1).to(torch.int16).view(torch.float16).double().diff().unique()
        printed = 2.0 ** (exponent - 10)
        wrong += steps.tolist() != [printed]
        yield Finding(
            f"from {f'2^{exponent}' if low else '0'} to {'65504' if exponent == 15 else f'2^{exponent + 1}'}: interval",
            float(steps[0]),
            printed,
        )
    yield Finding("intervals that differ", float(wrong), 0.0)

    def rounded(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float64).half())

    overflow = next(x for x in range(65505, 65537) if rounded(x) == float("inf"))
    yield Finding("smallest whole number that becomes infinity", float(overflow), 65519.0)
    zero = next(e for e in range(-20, -30, -1) if rounded(2.0**e) == 0.0)
    yield Finding("largest power of two that becomes 0", 2.0**zero, 2.0**-25)
    yield Finding("0.75 x 2^-24 becomes", rounded(0.75 * 2.0**-24), 0.0)


def detector(task: Task) -> Iterator[Finding]:
    """Measure average precision by the size of the loss and the loss scale."""
    for row in fp16_amp.detection(DETECTOR_STEPS[task.size]):
        fp16 = by_name(row["level"]).fp16_weights
        prefix = f"{'FP16' if fp16 else 'FP32'}, loss times {row['factor']}, loss scale {row['loss_scale']}"
        plain = fp16 and (row["loss_scale"], row["factor"]) == (1.0, "1")
        yield Finding(f"{prefix}: average precision", float(row["average_precision"]), "diverges" if plain else None, seed=0)
        yield Finding(f"{prefix}: gradient that is zero", 100 * float(row["zeros"]), unit="%", seed=0)


def language_model(task: Task) -> Iterator[Finding]:
    """Measure the loss by loss scale, and the share of activation gradients below 2^-24."""
    for row in table(LSTM[task.size], bytes_of(task.text)):
        fp16 = by_name(row["level"]).fp16_weights
        prefix = f"FP16, loss scale {row['loss_scale']}" if fp16 else "FP32"
        yield Finding(f"{prefix}: validation loss", float(row["valid_loss"]), unit="nats per byte", seed=0)
        yield Finding(f"{prefix}: gradient that is zero", 100 * float(row["zeros"]), unit="%", seed=0)
        if not fp16:
            for scale, claim in (("1", "most"), ("8", None), ("128", None)):
                share = 100 * float(row[f"below_at_{scale}"])
                yield Finding(f"activation gradients below 2^-24, loss scale {scale}", share, claim, "%", seed=0)


def classification(task: Task) -> Iterator[Finding]:
    """Table 1 in small: top-1 accuracy in FP32 and in FP16 mixed precision, by seed, and the mean of the differences."""
    steps, width, seeds = CLASSIFIERS[task.size]
    apart = []
    for seed in range(1, seeds + 1):
        fp32, mixed = (fp16_classifier.accuracy(level, seed, steps, width) for level in ("O0", "O2"))
        apart.append(mixed - fp32)
        yield Finding("FP32: accuracy", fp32, unit="%", seed=seed)
        yield Finding("mixed precision: accuracy", mixed, unit="%", seed=seed)
    between = interval(apart)
    printed = paper("slides.table1").values()
    yield Finding("mixed precision less FP32, mean", between.mean, sum(mixed - fp32 for fp32, mixed in printed) / len(printed), "points")
    if between.half_width is not None:
        yield Finding("half width of its 95 % interval", between.half_width, unit="points")


def small_updates(task: Task) -> Iterator[Finding]:
    """Count weight gradients below 2^-24, and products of learning rate and gradient, in FP32 training of two small models."""
    text = bytes_of(task.text)
    shape, loop = fp16_lstm.SIZES[LSTM[task.size]], GPTS[task.size]
    for name, model, lr, steps in (
        ("LSTM", lambda: fp16_lstm.Model(shape), shape.lr, pieces(text, shape, shape.steps, fp16_lstm.SEED)),
        ("GPT", lambda: Bytes(loop), loop.lr, pieces(text, loop, loop.steps, fp16_lstm.SEED)),
    ):
        gradients, updates, counted = 0, 0, 0
        torch.manual_seed(fp16_lstm.SEED)
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=lr)
        for tokens in steps:
            optimizer.zero_grad()
            F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for g in (p.grad.abs() for p in net.parameters() if p.grad is not None):
                nonzero = g > 0  # rows of an embedding whose byte is not in the batch have no gradient
                gradients += int((nonzero & (g < fp16_lstm.SMALLEST)).sum())
                updates += int((nonzero & (lr * g < fp16_lstm.SMALLEST)).sum())
                counted += int(nonzero.sum())
            optimizer.step()
        yield Finding(f"{name}: weight gradients below 2^-24", 100 * gradients / counted, 5.0, "%", seed=fp16_lstm.SEED)
        yield Finding(f"{name}: learning rate x weight gradient below 2^-24", 100 * updates / counted, 5.0, "%", seed=fp16_lstm.SEED)


def weight_copies(task: Task) -> Iterator[Finding]:
    """Measure the share of 64 small updates that arrives in an FP16 weight, and in an FP32 copy."""
    for row in fp16_amp.weight_copies():
        copy = by_name(row["level"]).master_weights
        prefix = f"update of {row['update_over_value']} of the weight, {'FP32 copy' if copy else 'FP16 alone'}"
        yield Finding(f"{prefix}: share that arrives", float(row["arrived"]), 1.0 if copy else None)


def overflow(task: Task) -> Iterator[Finding]:
    """Train with a dynamic loss scale that starts too high."""
    trace = list(fp16_amp.overflow())
    scales = [float(row["loss_scale"][2:]) for row in trace]
    yield Finding("loss scale at first", scales[0], unit="powers of two", seed=0)
    yield Finding("lowest loss scale", min(scales), unit="powers of two", seed=0)
    yield Finding("steps until then", float(scales.index(min(scales)) + 1), seed=0)
    yield Finding("loss at the end over the first", float(trace[-1]["loss"]) / float(trace[0]["loss"]), seed=0)
    for row, scale in zip(trace, scales, strict=True):
        yield Finding("log2 of the loss scale", scale, x=row["step"], seed=0)


def tensor_cores(task: Task) -> Iterator[Finding]:
    """Time matrix products on a GPU: FP16 and TF32 relative to FP32, by shape."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for rows, columns in SHAPES:
            times = {}
            for name, dtype, tf32 in (("FP32", torch.float32, False), ("TF32", torch.float32, True), ("FP16", torch.float16, False)):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                square = partial(torch.matmul, *2 * [torch.randn(rows, columns, device="cuda", dtype=dtype)])
                times[name] = median(launched(square, REPEATS))
            for name in ("TF32", "FP16"):
                yield Finding(f"{rows} x {columns}: {name} over FP32", times["FP32"] / times[name], unit="times the speed")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
