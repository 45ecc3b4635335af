"""Reproduce the slides on mixed precision: detector, language model, weight copies, overflow, and the speed of Tensor Cores."""

from collections.abc import Iterator

import torch

from msamp.fp16.opt_level import by_name
from tools.reproduce import fp16_amp
from tools.reproduce.entry import Axes, Entry, Finding, Needs, Task
from tools.reproduce.fp16_lstm import bytes_of, table
from tools.reproduce.run_tool import rows_of

DETECTOR_STEPS = {"toy": 4, "small": 300}
LSTM = {"toy": "tiny", "small": "toy", "full": "full"}
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
        paper = 2.0 ** (exponent - 10)
        wrong += steps.tolist() != [paper]
        yield Finding(
            f"from {f'2^{exponent}' if low else '0'} to {'65504' if exponent == 15 else f'2^{exponent + 1}'}: interval",
            float(steps[0]),
            paper,
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
    words = ["--steps", str(DETECTOR_STEPS[task.size]), "--csv", str(task.folder / "amp.csv")]
    for row in rows_of("fp16_amp", words, task.folder / "amp.csv"):
        if row["what"] == "detection":
            prefix = (
                f"{'FP16' if by_name(row['level']).fp16_weights else 'FP32'}, loss times {row['factor']}, loss scale {row['loss_scale']}"
            )
            plain = by_name(row["level"]).fp16_weights and (row["loss_scale"], row["factor"]) == ("1.0", "1")
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
            for scale, paper in (("1", "most"), ("8", None), ("128", None)):
                share = 100 * float(row[f"below_at_{scale}"])
                yield Finding(f"activation gradients below 2^-24, loss scale {scale}", share, paper, "%", seed=0)


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
                times[name] = _seconds(torch.randn(rows, columns, device="cuda", dtype=dtype))
            for name in ("TF32", "FP16"):
                yield Finding(f"{rows} x {columns}: {name} over FP32", times["FP32"] / times[name], unit="times the speed")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _seconds(x: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        x @ x
    start.record()
    for _ in range(REPEATS):
        x @ x
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS / 1e3


ENTRIES = (
    Entry(
        name="slides-numbers",
        title="Slides, intervals of FP16",
        claim="FP16's numbers are as far apart as in the table; values below 2^-24 become 0, and those above 65519 infinity.",
        run=numbers,
        sizes={"toy": Needs(computed=True)},
        headline="intervals that differ",
    ),
    Entry(
        name="slides-detector",
        title="Slides, Table 2",
        claim="A single-shot detector diverges in FP16 without loss scaling, and reaches FP32's precision with it.",
        run=detector,
        sizes={"toy": Needs(), "small": Needs(minutes=10)},
        headline="FP16, loss times 1, loss scale 1.0: average precision",
        reason="A small detector; Multibox SSD and its images were not available.",
        slow=True,
    ),
    Entry(
        name="slides-lstm",
        title="Slides, Figure 5",
        claim="Most activation gradients are below 2^-24; a language model needs a loss scale.",
        run=language_model,
        sizes={"toy": Needs(), "small": Needs(minutes=5, text=True), "full": Needs(gpus=1, gib=40, minutes=5, text=True)},
        headline="activation gradients below 2^-24, loss scale 1",
    ),
    Entry(
        name="slides-weight-copy",
        title="Slides, FP32 weight copies",
        claim="Small updates are lost in an FP16 weight and arrive in an FP32 copy.",
        run=weight_copies,
        sizes={"toy": Needs(computed=True)},
        headline="update of 2^-12 of the weight, FP16 alone: share that arrives",
    ),
    Entry(
        name="slides-overflow",
        axes=Axes(y="loss scale, log2"),
        title="Slides, automatic loss scaling",
        claim="After an overflow the step is skipped, the scale falls, and training continues.",
        run=overflow,
        sizes={"toy": Needs()},
        headline="loss at the end over the first",
        slow=True,
    ),
    Entry(
        name="slides-tensor-cores",
        title="Slides, throughput of FP16",
        claim="Training in low precision is computationally efficient.",
        run=tensor_cores,
        sizes={"full": Needs(gpus=1, gib=16, minutes=1)},
        headline="8192 x 8192: FP16 over FP32",
        reason="The slides give no number for the speed of FP16. That Tensor Cores are several times as fast for suitable shapes is from "
        "the vendor's documents.",
    ),
)
