"""Derive the planner's rates, `megatron/lm/planning/rates.csv`, from measurements; each row of the file names its source.

    python tools/bench/derive_rates.py            # writes the file
    python tools/bench/derive_rates.py --check    # writes nothing; exit code 1 if the file does not match the measurements

FITTED lists the measurements of whole steps that a rate is derived from; `tools/bench/check_plan.py` judges the planner on all others.
Numbers without such a measurement are in PROBED: probes run outside the repository, and numbers from `tools/bench/LOG.md`.
"""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.lm.config.cli import parse_args
from megatron.lm.planning.expert_time import MOVED_HIDDEN, MOVED_WIDTH
from megatron.lm.planning.memory import plan
from megatron.lm.planning.rates import GPUS, Cluster, MeasuredRate, Rates
from megatron.lm.planning.time import predict
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from megatron.lm.shell.files import written_aside
from tools.bench.bench_grouped import MODELS, Layer
from tools.measurements import ROOT, Row, read

GPU = "NVIDIA H200"
FILE = "megatron/lm/planning/rates.csv"
COLUMNS = ("gpu", "name", "at", "value", "unit", "source", "commit")
BENCH, COAT_MEMORY = "tools/bench/results", "tools/reproduce/results/coat_memory.csv"
PROFILE, KERNELS, STEP, OPTIMIZER, PARALLEL, GRID, LAYER, GROUPED = (
    f"{BENCH}/{name}.csv" for name in ("profile", "kernels", "step", "optimizer", "data_parallel", "grid", "experts", "grouped")
)
LAYERS, HIDDEN, TOKENS, VOCABULARY = 24, 2048, 8192, 50304  # GPT-1.3B, micro-batch 4
MOE, EXPERTS_AT, MOE_AT = f"{BENCH}/moe.csv", "d48e830b", "757f8790"
LINEAR = 12 * HIDDEN**2 * LAYERS  # weights of its linear layers
TP = "O3 --tensor-model-parallel-size 2 --sequence-parallel"
PROFILED, NEWER, SPLIT_TP, COAT_UPDATE, ROTATED = "d77a990", "3ce29b82", "5fa3333b", "e3da096", "2c95adf"
TP_NCCL = f"{TP} --tp-transport nccl"
# Whole steps that a rate is derived from: file, commit, case, micro-batch.
FITTED = (
    (STEP, PROFILED, "O3", "4"),
    (STEP, PROFILED, "O2", "4"),
    (STEP, "130f7fa", "O2", "4"),
    (STEP, "130f7fa", "O2+tensorwise", "4"),
    (STEP, "130f7fa", "O2+blockwise", "4"),
    (STEP, "484bfc7", "O3", "4"),
    (STEP, "484bfc7", "O3 --save-activations coat", "4"),
    (STEP, "fb6e7d2", "O0", "4"),
    (STEP, "fb6e7d2", "O3", "4"),
    (COAT_MEMORY, "de29eee", "bf16", "4"),
    (COAT_MEMORY, "de29eee", "bf16", "8"),
    (STEP, ROTATED, "O0", "4"),
    (STEP, ROTATED, "O0", "8"),
    (PARALLEL, "d2fde52", "O3", "4"),
    (MOE, MOE_AT, "O0, mock data", "1"),
    (STEP, NEWER, "O3", "4"),
    (STEP, NEWER, "O2", "4"),
    (GRID, SPLIT_TP, TP, "8"),
    (GRID, NEWER, TP_NCCL, "8"),
)
PROBE = "probe of two H200s outside the repository"
BETWEEN = f"{GRID}: {TP}, between what the steps of GPT-1.3B (0.01) and of 7B (0.62) take beside their kernels"
BLOCK_GEMMS = f"GEMMs of 8192 x 8192 x 2048, 222 + 222 + 278 us against 195 + 204 + 204; {PROBE}"
PROBED = (
    ("tp exposed, copies", None, 0.15, "share", BETWEEN, SPLIT_TP),
    ("attention", 8192, 7 * 8192 * 8192 * 4096 / 3435e-6 / 1e12, "TFLOP/s", f"cuDNN's BF16 attention, 858 + 2577 us; {PROBE}", "943fe36"),
    ("attention", 32768, 7 * 32768 * 32768 * 4096 / 53293e-6 / 1e12, "TFLOP/s", f"the same, 13542 + 39751 us; {PROBE}", "943fe36"),
    ("block gemm", None, 603 / 722, "of fp8 gemm", BLOCK_GEMMS, "943fe36"),
    ("link", None, 320.0, "GB/s", f"NCCL: FP32 all-reduce of 537 MB 1.72 ms, BF16 of 268 MB 0.90 ms; {PROBE}", "943fe36"),
    ("latency", None, 45.0, "us", f"NCCL: gather of 16.8 MB 90 us; {PROBE}", "943fe36"),
    ("host fused", None, 155e3 / LAYERS, "us", "tools/bench/LOG.md: 155 ms of 24 fused layers, eager", PROFILED),
)
BY_KERNEL = "tools/bench/LOG.md: OLMoE by kernel"
# Of 65,536 rows, per element of width 2,048 the copies and sums, per element of width 1,024 SwiGLU and its backward.
OF_ROWS = (
    ("copies of rows", (155 + 189) * 1e6 / (65536 * 2048), BY_KERNEL + ", sums and copies of rows", "9258bafc"),
    ("swiglu of rows", (98 + 274) * 1e6 / (65536 * 1024), BY_KERNEL + ", SwiGLU", "9258bafc"),
)


class Rate(NamedTuple):
    """A row of the file without its GPU."""

    name: str
    at: float | None
    value: float
    unit: str
    source: str
    commit: str


def one(name: str, **values: str) -> Row:
    """Return the last row of a file with these values; ValueError if there is none."""
    matching = [row for row in read(name) if values.items() <= row.items()]
    if not matching:
        raise ValueError(f"{name} has no row with {values}: the rate cannot be derived from it")
    return matching[-1]


def kernel(name: str) -> float:
    """Return the seconds of a kernel."""
    return float(one(KERNELS, kernel=name)["us"]) * 1e-6


def profiled(kind: str, commit: str = PROFILED, case: str = "O3") -> float:
    """Return the seconds per step of a kind of kernel."""
    return float(one(PROFILE, commit=commit, case=case, kind=kind)["ms"]) * 1e-3


def profiled_tp(kind: str) -> float:
    """Return the seconds per step of a kind of kernel with TP 2 and twice the tokens."""
    return profiled(kind, NEWER, TP_NCCL)


def step(name: str, commit: str, case: str, micro_batch: int = 4) -> float:
    """Return the seconds of a step of GPT-1.3B."""
    return float(one(name, gpu=GPU, commit=commit, case=case, preset="1.3b", micro_batch=str(micro_batch))["ms"]) * 1e-3


def arithmetic() -> Iterator[Rate]:
    """Yield the rates of GEMMs and attention."""
    products = 6 * LINEAR * TOKENS / 1e12
    yield Rate("fp8 gemm", HIDDEN / 2, products / profiled_tp("GEMM FP8"), "TFLOP/s", f"{PROFILE}: GEMM FP8, TP 2", NEWER)
    whole = products / profiled("GEMM FP8")
    yield Rate("fp8 gemm", HIDDEN, whole, "TFLOP/s", f"{PROFILE}: GEMM FP8", PROFILED)
    head = 6 * TOKENS * VOCABULARY * HIDDEN / profiled("GEMM") / 1e12
    yield Rate("bf16 gemm", HIDDEN, head, "TFLOP/s", f"{PROFILE}: GEMM, the LM head", PROFILED)
    wide = float(one(KERNELS, kernel="BF16 linear, 8192 x 8192")["tflops"])
    yield Rate("bf16 gemm", 8192, wide, "TFLOP/s", f"{KERNELS}: BF16 linear, 8192 x 8192", "cec76f9")
    core = 7 * TOKENS * 2048 * HIDDEN * LAYERS
    yield Rate("attention", 2048, core / profiled("attention") / 1e12, "TFLOP/s", f"{PROFILE}: attention", PROFILED)
    forward, backward = (kernel(f"attention {way}, cudnn") for way in ("forward", "backward"))
    yield Rate("attention forward", None, forward / (forward + backward), "share", f"{KERNELS}: attention, cudnn", "cec76f9")
    flash = core / LAYERS / sum(kernel(f"attention {way}, flash") for way in ("forward", "backward")) / 1e12
    yield Rate("attention flash", 2048, flash, "TFLOP/s", f"{KERNELS}: attention, flash", "cec76f9")
    for name, at, value, unit, source, commit in PROBED:
        value, unit = (whole * value, "TFLOP/s") if unit == "of fp8 gemm" else (value, unit)
        yield Rate(name, at, value, unit, source, commit)


def elements() -> Iterator[Rate]:
    """Yield the rates of a fused layer's kernels per element, and of kernels per weight."""
    hidden = TOKENS * HIDDEN * LAYERS
    per = 1e12
    yield Rate("norm", None, profiled("norm") / (hidden * (2 + 1 / LAYERS)) * per, "ps", f"{PROFILE}: norm", PROFILED)
    yield Rate("gelu", None, profiled("activation") / (4 * hidden) * per, "ps", f"{PROFILE}: activation", PROFILED)
    swiglu = kernel("SwiGLU") + kernel("SwiGLU backward + SwiGLU again")
    yield Rate("swiglu", None, swiglu / (TOKENS * 4096) * per, "ps", f"{KERNELS}: SwiGLU, SwiGLU backward", "cec76f9")
    yield Rate("rotary", None, profiled("rotary") / (3 * hidden) * per, "ps", f"{PROFILE}: rotary", PROFILED)
    transpose = kernel("transpose of an FP8 weight") / (8192 * HIDDEN)
    yield Rate("transpose of a weight", None, transpose * per, "ps", f"{KERNELS}: transpose of an FP8 weight", "cec76f9")
    pack = (kernel("amaxes of BF16 gradients") + kernel("BF16 gradients into an E4M3 bucket")) / (4 * 12 * HIDDEN**2)
    yield Rate("pack of a gradient", None, pack * per, "ps", f"{KERNELS}: amaxes of BF16 gradients, into an E4M3 bucket", "67af633")
    rest = sum(map(profiled, ("cast", "other", "memory"))) - LINEAR * (transpose + pack)
    yield Rate("rest of a layer", None, rest / hidden * per, "ps", f"{PROFILE}: cast, other and memory, less what goes by weight", PROFILED)
    over_two = sum(map(profiled_tp, ("cast", "other", "memory"))) - LINEAR / 2 * (transpose + pack)
    yield Rate("rest of a layer, tp", None, over_two / (2 * hidden) * per, "ps", f"{PROFILE}: cast, other and memory, TP 2", NEWER)
    yield Rate("loss", None, profiled("loss") / (TOKENS * VOCABULARY) * per, "ps", f"{PROFILE}: loss", PROFILED)
    loss_tp = profiled_tp("loss") / (2 * TOKENS * VOCABULARY / 2)
    yield Rate("loss, tp", None, loss_tp * per, "ps", f"{PROFILE}: loss, TP 2", NEWER)
    kernels = sum(float(row["ms"]) for row in read(PROFILE) if row["commit"] == PROFILED and row["kind"] != "idle") * 1e-3
    gap = (step(STEP, PROFILED, "O3") - kernels) / LAYERS
    yield Rate("gap", None, gap * 1e6, "us", f"{STEP}: O3, less its kernels of {PROFILE}, a layer", PROFILED)
    launches = sum(int(row["launches"] or 0) for row in read(PROFILE) if row["commit"] == PROFILED)
    yield Rate("launch", None, profiled("idle") / launches * 1e6, "us", f"{PROFILE}: idle, a launch", PROFILED)
    cast = kernel("cast + transpose + column sums") / (TOKENS * HIDDEN)
    yield Rate("cast", None, cast * per, "ps", f"{KERNELS}: cast + transpose + column sums", "cec76f9")


def grouped() -> Iterator[Rate]:
    """Yield the rates of experts: their products, and in FP8 everything else in the layer."""
    kinds: dict[str, tuple[float, float]] = {}
    for name, kernels in (("grouped fp8", ("ours fast", "ours full")), ("grouped bf16", ("torch BF16",))):
        flops, weight = kinds[name] = products(kernels)
        source = f"{GROUPED}: {kernels[0].split()[0]}, balanced, a fit to {len(MODELS)} models"
        yield Rate(name, None, 1e-12 / flops, "TFLOP/s", source, EXPERTS_AT)
        yield Rate(f"{name}, weights", None, weight * 1e12, "ps", source, EXPERTS_AT)
    fc1, fc2 = MODELS["olmoe"]
    for name, value, *_ in OF_ROWS:
        yield Rate(name, None, value, "ps", *_)
    (flops, weight), padded = kinds["grouped fp8"], fc1.rows + 64 * fc1.experts  # random choices, each expert's rows padded to 128
    known = flops * 6 * padded * 3 * fc2.inputs * fc1.inputs + weight * elements_of(fc1, fc2)
    known += 1e-12 * padded * sum(value * width for (_, value, *_), width in zip(OF_ROWS, (fc1.inputs, fc2.inputs), strict=True))
    layer = float(one(LAYER, commit=EXPERTS_AT, model=fc1.model, case="FP8, forward and backward")["us"])
    yield Rate("order of rows", None, layer - known * 1e6, "us", f"{LAYER}: {fc1.model}, less products and rows", EXPERTS_AT)
    casts = float(one(LAYER, commit=EXPERTS_AT, model=fc1.model, case="FP8, casts of the weights")["us"]) * 1e-6
    source = f"{LAYER}: {fc1.model}, casts of the weights"
    yield Rate("cast of experts", None, casts / elements_of(fc1, fc2) * 1e12, "ps", source, EXPERTS_AT)


def elements_of(*layers: Layer) -> int:
    """Return the elements of the experts' weights."""
    return sum(layer.experts * layer.inputs * layer.outputs for layer in layers)


def products(kernels: Sequence[str]) -> tuple[float, float]:
    """Return seconds per FLOP and seconds per weight of six products, whose sums over the models they fit best in relative error."""
    sums = [0.0] * 5  # of a a, a b, b b, a, b, where a and b are FLOPs and weights per second of each model
    for fc1, fc2 in MODELS.values():
        rows = [row for row in read(GROUPED) if row["commit"] == EXPERTS_AT and row["load"] == "balanced" and row["kernel"] in kernels]
        seconds = sum(float(row["us"]) for row in rows if row["model"] == fc1.model) * 1e-6
        a = 6 * sum(layer.rows * layer.inputs * layer.outputs for layer in (fc1, fc2)) / seconds
        b = elements_of(fc1, fc2) / seconds
        sums = [total + term for total, term in zip(sums, (a * a, a * b, b * b, a, b), strict=True)]
    aa, ab, bb, a, b = sums
    return (a * bb - b * ab) / (aa * bb - ab * ab), (b * aa - a * ab) / (aa * bb - ab * ab)


def unfused_rows(known: Sequence[Rate]) -> Rate:
    """Return the rate of the kernels between the experts' products at O0: a step, less what the planner predicts from the `known` rates."""
    row = one(MOE, commit=MOE_AT, case="O0, mock data")
    text = f"--preset olmoe-1b-7b --num-layers {row['layers']} --micro-batch-size {row['micro_batch']} --global-batch-size 8 --opt-level O0"
    config = parse_args(text.split())
    name, source = "unfused rows", f"{MOE}: O0, less the rest of the step"
    rates = Rates(GPUS["h200"], tuple(MeasuredRate(GPU, *rate) for rate in (*known, Rate(name, None, 1e30, "TB/s", source, MOE_AT))), False)
    rest = predict(config, Cluster(gpus=1, per_host=8, link=1.0, network=1.0, latency=0.0), rates, plan(config, 1)).total
    tokens, model = config.tokens * config.num_micro_batches(1), config.model
    moved = tokens * model.num_layers * model.moe_router_topk * (MOVED_HIDDEN * model.hidden_size + MOVED_WIDTH * model.expert_size)
    step = tokens / float(row["tokens_s"])
    return Rate(name, None, moved / (step - rest) / 1e12, "TB/s", source, MOE_AT)


def whole_steps() -> Iterator[Rate]:
    """Yield the rates that are a difference between two whole steps, or a remainder of one."""
    per, hidden, operands = 1e12, TOKENS * HIDDEN * LAYERS, 16 * TOKENS * HIDDEN * LAYERS
    scaled_weights, fp8_weights = optimizer("O2"), optimizer("O3")
    cast = step(STEP, NEWER, "O2") - step(STEP, NEWER, "O3") - (optimizer("O2", NEWER) - optimizer("O3", NEWER))
    yield Rate("cast of a weight", None, cast / LINEAR * per, "ps", f"{STEP}: O2 less O3, the update aside", NEWER)
    weight = step(STEP, PROFILED, "O2") - step(STEP, PROFILED, "O3") - (scaled_weights - fp8_weights)  # at the commits below
    in_time = step(STEP, "130f7fa", "O2+tensorwise") - step(STEP, "130f7fa", "O2")
    yield Rate("just in time", None, in_time / operands * per, "ps", f"{STEP}: O2+tensorwise less O2", "130f7fa")
    groups = step(STEP, "484bfc7", "O3 --save-activations coat") - step(STEP, "484bfc7", "O3")
    yield Rate("groups of activations", None, groups / (6 * hidden) * per, "ps", f"{STEP}: O3 --save-activations coat less O3", "484bfc7")
    gemm = 6 * (LINEAR + VOCABULARY * HIDDEN) * TOKENS / (6 * TOKENS * VOCABULARY * HIDDEN / profiled("GEMM"))
    others = gemm + profiled("attention") + profiled("loss")
    byte = (step(STEP, ROTATED, "O0", 8) - step(STEP, ROTATED, "O0") - others) / (32 * hidden)
    yield Rate("unfused byte", None, byte * per, "ps", f"{STEP}: O0, micro-batch 8 less 4, less GEMMs and attention", ROTATED)
    gap = LAYERS * 1e-6 * next(rate.value for rate in elements() if rate.name == "gap")
    fp8, head = 6 * LINEAR * TOKENS / (603 / 722 * 6 * LINEAR * TOKENS / profiled("GEMM FP8")), profiled("GEMM") + profiled("loss")
    # Time of unfused layers at the commit of the block-scaling measurements.
    unfused = step(COAT_MEMORY, "de29eee", "bf16", 8) - step(COAT_MEMORY, "de29eee", "bf16") - others
    known = fp8 + head + profiled("attention") + unfused + scaled_weights + gap
    known += (
        LINEAR * 1e-12 * sum(rate.value for rate in elements() if rate.name in ("transpose of a weight", "pack of a gradient")) + weight
    )
    block = (step(STEP, "130f7fa", "O2+blockwise") - known) / operands
    yield Rate("block cast", None, block * per, "ps", f"{STEP}: O2+blockwise, less the rest", "130f7fa")
    speed = float(one(OPTIMIZER, commit="67af633", case="step in a graph", level="O3")["gb_s"])
    copy = float(one(OPTIMIZER, commit="67af633", case="step in a graph", level="O3")["copy_gb_s"])
    yield Rate("update", None, speed / 1e3, "TB/s", f"{OPTIMIZER}: O3, in a graph", "67af633")
    yield Rate("copy", None, copy / 1e3, "TB/s", f"{OPTIMIZER}: copy", "67af633")
    coat, plain = (one(OPTIMIZER, commit=COAT_UPDATE, case="step in a graph", level=level) for level in ("coat", "O3"))
    moved = float(coat["bytes_per_param"]) * float(coat["params_m"]) * 1e6 / (float(plain["gb_s"]) * 1e9)
    slower = float(coat["ms"]) * 1e-3 - moved
    yield Rate("update of groups", None, slower / float(coat["params_m"]) * 1e6, "ps", f"{OPTIMIZER}: coat, less its bytes", COAT_UPDATE)
    alone, two = step(STEP, PROFILED, "O3"), step(PARALLEL, "d2fde52", "O3")
    gathered = 1311.6e6 * 1.08 / 2 / 320e9
    surcharge = two - alone + fp8_weights / 2 - gathered
    yield Rate("data parallel", None, surcharge / 1311.6e6 * per, "ps", f"{PARALLEL}: O3 on two GPUs less {STEP}: O3 on one", "d2fde52")
    of_step = [row["kind"] for row in read(PROFILE) if (row["commit"], row["case"]) == (NEWER, TP_NCCL)]
    beside = sum(profiled_tp(kind) for kind in of_step if kind not in ("NCCL", "idle")) + gap
    sent = float(one(GRID, gpu=GPU, commit=NEWER, case=TP_NCCL)["activation_mib"]) * 2**20 / 320e9 + (10 * LAYERS + 4) * 45e-6
    exposed = (step(GRID, NEWER, TP_NCCL, 8) - beside) / sent
    yield Rate("tp exposed", None, exposed, "share", f"{GRID}: {TP_NCCL}, less its kernels", NEWER)
    for name, case in (("host bf16", "O0"), ("host fp8", "O3")):
        eager = step(STEP, "fb6e7d2", case) / LAYERS * 1e6
        yield Rate(name, None, eager, "us", f"{STEP}: {case}, eager and unfused, a layer", "fb6e7d2")


def optimizer(level: str, commit: str = PROFILED) -> float:
    """Return the seconds of a level's update in a graph."""
    return float(one(OPTIMIZER, commit=commit, case="step in a graph", level=level)["ms"]) * 1e-3


def text() -> str:
    """Return the content of the file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    known = (*arithmetic(), *elements(), *whole_steps(), *grouped())
    for rate in (*known, unfused_rows(known)):
        writer.writerow((GPU, rate.name, "" if rate.at is None else f"{rate.at:g}", f"{rate.value:.5g}", *rate[3:]))
    return stream.getvalue()


@exit_codes.command
def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Command line; exit code 1 if --check finds a different file."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and report whether the file matches the measurements")
    options = parser.parse_args(arguments)
    file, new = root / FILE, text()
    same = file.is_file() and file.read_text(encoding="utf-8") == new
    if not options.check and not same:
        with written_aside(file) as stream:
            stream.write(new.encode())
    print(f"{FILE} {'matches' if same else 'did not match' if not options.check else 'does not match'} the measurements")
    return int(options.check and not same)


if __name__ == "__main__":
    sys.exit(main())
