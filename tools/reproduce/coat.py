"""Reproduce COAT's tables and figures: errors of the moments, saved activations and their share of memory, losses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron.lm.config import PrecisionConfig
from megatron.lm.config.cli import parse_args
from megatron.lm.config.sections.precision import saved_activations
from megatron.lm.planning.memory import layer_activations
from tools.measurements import ROOT, Row
from tools.reproduce import coat_flow, coat_states
from tools.reproduce.coat_activations import KEPT, SWIGLU, read_model
from tools.reproduce.entry import Finding, Task, training
from tools.reproduce.fp16_lstm import bytes_of
from tools.reproduce.trainings import ENWIK8, Loop, byte_data, trained

SHAPES: Mapping[str, tuple[int, str]] = {  # by size: steps, flags of the trainer
    "toy": (10, "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 2e-3 --eval-iters 1"),
    "small": (300, "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --lr 2e-3 --eval-iters 1"),
    "full": (1000, "--eval-iters 1"),
}
FLOWS: Mapping[str, tuple[Loop, int]] = {  # by size: the training run, and its seeds
    "toy": (Loop(width=32, layers=1, length=16, batch=4, steps=10, warm_up=2), 1),
    "small": (Loop(width=64, layers=4, length=64, batch=16, steps=300), 3),
    "full": (Loop(width=768, layers=12, length=512, batch=16, steps=500, lr=1e-3, warm_up=50), 3),
}
LLAMA = {"7b": "--preset 7b", "13b": "--preset 13b --tensor-model-parallel-size 1 --no-sequence-parallel"}
LIKE_LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear"
SMOLLM2 = "data/smollm2"
GROUPS = "groups of 16 channels"
GAIN = "norm input: groups of 16 channels above one scale, worst token"


def states(task: Task) -> Iterator[Finding]:
    """Measure the ranges of the moments, and the error of the update from stored moments, by `coat_states.measured`."""
    steps, shape = SHAPES[task.size]
    data = ROOT / ENWIK8 if task.size == "full" else byte_data(task.text, task.folder / "bytes")
    saved = task.folder / f"bf16_{steps}"
    trained("bf16", 1234, steps, f"{shape} --save {saved} --save-interval {steps}", data, task.folder / "runs")
    measured = coat_states.measured(saved)
    for row in (row for row in measured if row["weights"] == "all"):
        if row["range_median"]:
            yield Finding(f"{row['what']}, median of the groups", float(row["range_median"]), float(row["page_range"]), seed=1234)
            continue
        formats = f"m {row['m']}, v {row['v']}, {'expanded' if row['expand'] == 'yes' else 'plain'}"
        for key, name in (("group_error", "median error of a group's update"), ("mse", "mean square error")):
            yield Finding(f"{formats}: {name}", float(row[key]), seed=1234)
    error = {(row["m"], row["v"], row["expand"]): float(row["group_error"]) for row in measured if row["weights"] == "all" and row["m"]}
    gains = [error[m, v, "no"] / error[m, v, "yes"] for m, v, expand in error if expand == "yes"]
    yield Finding("expansion divides the error by, least of the four pairs", min(gains), seed=1234)


def activations(task: Task) -> Iterator[Finding]:
    """Measure the error of saved activations by granularity, by `coat_activations.read_model`."""
    yield from of_layers(read_model(ROOT / SMOLLM2, task.text))


def of_layers(measured: Sequence[Row]) -> Iterator[Finding]:
    """Summarize the rows of `read_model`: the layer with the largest peak, the worst layer of each measure, and the gain of groups."""
    gains = {}
    for what in (*KEPT, SWIGLU):
        of_input = [row for row in measured if row["what"] == what]
        most = max((row for row in of_input if row["kept"] == "BF16"), key=lambda row: float(row["peak_over_rms"]))
        place = f"{what}, layer {most['layer']}, which has the largest peak"
        yield Finding(f"{place}: largest magnitude over the rms", float(most["peak_over_rms"]))
        for key, name in (("outlier_tokens", "tokens"), ("outlier_channels", "channels")):
            yield Finding(f"{place}: {name} that hold an outlier", 100 * float(most[key]), unit="%")
        yield Finding(f"{place}: outliers in the first token of a sequence", 100 * float(most["outlier_first"]), unit="%")
        yield Finding(f"{place}: largest token over the median one, rms", float(most["token_spread"]))
        yield Finding(f"{place}: largest channel over the median one, rms, first tokens aside", float(most["channel_spread"]))
        worst = {}
        for kept in ("tensor", "token", GROUPS, "groups of 16 tokens"):
            rows = [row for row in of_input if row["kept"] == kept]
            for key, name in (("sqnr_db", "SQNR"), ("token_db", "SQNR of the median token"), ("worst_token_db", "SQNR of the worst token")):
                worst[kept, key] = min(float(row[key]) for row in rows)
                yield Finding(f"{what}, {kept}: {name}, worst layer", worst[kept, key], unit="dB")
            for key in ("underflow", "saturation"):
                worst[kept, key] = max(float(row[key]) for row in rows)
                yield Finding(f"{what}, {kept}: {key}, worst layer", 100 * worst[kept, key], unit="%")
            for row in rows if kept in ("tensor", GROUPS) and what in ("MLP norm input", "down projection input") else ():
                yield Finding(f"{what} by {kept}, share lost to zero (%)", 100 * float(row["underflow"]), x=float(row["layer"]))
        gains[what] = worst[GROUPS, "worst_token_db"] - worst["tensor", "worst_token_db"]
        yield Finding(f"{what}: groups of 16 channels above one scale, worst token and layer", gains[what], unit="dB")
    yield Finding(GAIN, max(gain for what, gain in gains.items() if "norm" in what), unit="dB")


def flow(task: Task) -> Iterator[Finding]:
    """Train a small Llama whose layers exchange FP8, with `tools/reproduce/coat_flow.py`."""
    name, _, seed = task.piece.rpartition(", seed ")
    loop, kind = FLOWS[task.size][0], coat_flow.FLOWS[name.removesuffix(" again")]
    *course, (_, valid) = _reported(task.piece, loop.steps, coat_flow.train(kind, loop, bytes_of(task.text), int(seed)))
    yield from training(name, course, valid, int(seed))


def _reported(piece: str, steps: int, losses: Iterator[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """Pass (step, training loss) on, and print each tenth of a training run that may take minutes."""
    for step, loss in losses:
        if step < steps and step % max(1, steps // 10) == 0:
            print(f"{piece}: step {step} of {steps}, loss {loss:.4f}", flush=True)
        yield step, loss


def share(task: Task) -> Iterator[Finding]:
    """Compute the shares of a layer's activations that norms and SwiGLU save, and linear layers, for Llama's shapes, with the dry run.

    A linear layer saves its input: of QKV and of gate and up 2 x hidden, of down the ffn's width. The input of the projection after
    attention is attention's own output, which attention saves.
    """
    for model, flags in LLAMA.items():
        config = parse_args([*flags.split(), *LIKE_LLAMA.split(), "--opt-level", "O0"])
        width, ffn = config.model.hidden_size, config.model.ffn_size
        for way in ("compute", "coat"):
            precision = PrecisionConfig(opt_level="O0", save_activations=way)
            whole = layer_activations(replace(config, precision=precision)) / config.model.seq_length / config.training.micro_batch_size
            kept, theirs = saved_activations(precision).element_bytes(2) * 2 * (width + ffn), 50.0 if way == "compute" else None
            yield Finding(f"{model}, activations kept as {way}: norms and SwiGLU", 100 * kept / whole, theirs, "%")
            if way == "compute":
                linear = 2 * (2 * width + ffn)
                yield Finding(f"{model}, activations kept as compute: linear layers", 100 * linear / whole, "less than 25", "%")
