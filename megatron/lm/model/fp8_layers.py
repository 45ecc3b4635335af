"""Choose the linear layers of an FP8 recipe that run in FP8: those that are faster in FP8 on this GPU, by measurements cached per machine.

A layer's gain is its BF16 time for forward and backward divided by its FP8 time including all casts, at its own shape and token count. If
a transformer layer runs as two fused blocks, its four linear layers are all FP8 or all BF16, by the sum of their times. Rank 0 decides for
all ranks. The configuration records the choice (`--bf16-linears`), and so does the checkpoint, so a resume on another machine computes the
same. The operand scaling is taken from the checkpoint in the same way (`decide`).

`--attention-precision auto` is decided by the same rule, from the times of the attention core at the run's shape (`choose_attention`): FP8
attention wins at some lengths and numbers of heads and loses at others.
"""

import importlib.metadata
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.config import LINEARS, ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.from_checkpoint import with_saved_rounding, with_saved_scaling
from megatron.lm.config.presets import linear_shapes
from megatron.lm.config.sections.baselines import PeerRecipe
from megatron.lm.config.sections.precision import MEASURED
from msamp.kernels.cuda_graph import capturing
from msamp.kernels.fp8_attention import default_scale
from msamp.kernels.scaled_mm import fp8_hardware
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Recipe

REPEATS = 20
L2_BYTES = 256 * 2**20  # written before each launch to flush the L2 cache: in a training step operands come from HBM


class Shape(NamedTuple):
    """Shape of a linear layer on one rank: input rows, input features, output features."""

    tokens: int
    inputs: int
    outputs: int


class AttentionShape(NamedTuple):
    """Shape of the attention core on one rank: sequences, tokens of each, heads, groups of heads that share a key, channels of a head."""

    batch: int
    tokens: int
    heads: int
    groups: int
    channels: int


class Times(NamedTuple):
    """Seconds of forward and backward."""

    bf16: float
    fp8: float


Measure = Callable[[Shape | AttentionShape, Recipe], Times]
SavedPrecision = Callable[[], PrecisionConfig | None]


@dataclass(frozen=True)
class Fp8LayerChoice:
    """The linear layers of a transformer layer that are BF16 (slots in the order of `LINEARS`), the reason, and the measured gains by
    slot; and what `--attention-precision auto` chose, with its reason, or an empty text without it."""

    bf16: tuple[str, ...] = ()
    reason: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)
    attention: str = ""


def read_table(path: Path) -> dict[str, Times]:
    """Read cached times by key. A missing or corrupt file reads as empty; invalid entries are skipped."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = {key: value for key, value in table.items() if isinstance(value, list) and len(value) == 2} if isinstance(table, dict) else {}
    return {key: Times(*pair) for key, pair in pairs.items() if all(type(x) is float and 0 < x < math.inf for x in pair)}


def write_table(path: Path, table: Mapping[str, Times]) -> None:
    """Replace the file atomically, so that no process reads half of it; warn if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as stream:
            json.dump(table, stream, indent=1, sort_keys=True)
        os.replace(stream.name, path)
    except OSError as error:
        warnings.warn(
            f"FP8 gains could not be saved and will be measured again: {error}; choose a file with --fp8-gain-cache", stacklevel=2
        )


def layer_shapes(model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int) -> dict[str, Shape]:
    """Return the shapes of a transformer layer's linear layers by slot, on one tensor-parallel rank for one micro-batch."""
    tokens, sizes = model.seq_length // parallel.context_parallel_size * micro_batch_size, linear_shapes(model, parallel)
    return {slot: Shape(tokens, inputs, outputs) for slot, (outputs, inputs) in sizes.items()}


def _has_fp8() -> bool:
    return fp8_hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def default_measure() -> Measure | None:
    """Return `measure` on hardware with FP8, else None: emulated FP8 has no gain."""
    return measure if _has_fp8() else None


def times_by_slot(precision: PrecisionConfig, shapes: Mapping[str, Shape], measure: Measure | None) -> dict[str, Times] | None:
    """Return the times from the cache file; measure and add missing ones. None if some are missing and `measure` is None."""
    recipe = precision.recipe
    assert recipe.gemm is not None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    operand = recipe.gemm.input
    scaling = f"{operand.scaling}" if operand.granularity == TENSORWISE else f"{operand.scaling} {operand.granularity}"
    # O1 and O2 cast the stored weight twice, O3 does not cast it.
    where = f"{gpu}, torch {torch.__version__}, weight {recipe.weight}, scaling {scaling}"
    keys = {slot: f"{where}, {s.tokens} x {s.inputs} x {s.outputs}" for slot, s in shapes.items()}
    times = _cached(precision, {keys[slot]: shape for slot, shape in shapes.items()}, measure)
    return times and {slot: times[key] for slot, key in keys.items()}


def _cached(precision: PrecisionConfig, shapes: Mapping[str, Shape | AttentionShape], measure: Measure | None) -> dict[str, Times] | None:
    """Return the times of shapes by key, from the cache file; measure and add missing ones. None as in `times_by_slot`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = Path(precision.fp8_gain_cache or folder / "msamp" / "fp8_gain.json")
    table = read_table(path)
    missing = {key: shape for key, shape in shapes.items() if key not in table}
    if missing:
        if measure is None:
            return None
        new = {key: measure(shape, precision.recipe) for key, shape in missing.items()}
        table = read_table(path) | new  # another run may have added entries in the meantime
        write_table(path, table)
    return {key: table[key] for key in shapes}


def choose(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    training: TrainingConfig,
    measure: Measure | None,
    saved: PrecisionConfig | None = None,
) -> Fp8LayerChoice:
    """Return the choice for a run, on one process.

    The first of these decides: `--bf16-linears`, `--fp8-min-gain` 0, the checkpoint, `--deterministic`, the gains.

    Args:
        model, parallel, precision, training: of the run.
        measure: returns the times of a linear layer; None to measure nothing.
        saved: settings of the run that is resumed, or None.
    """
    if not precision.named.fp8:
        return Fp8LayerChoice(reason=f"precision {precision.name}")
    if precision.bf16_linears is not None:
        return Fp8LayerChoice(tuple(slot for slot in LINEARS if slot in precision.bf16_linears), "by --bf16-linears")
    if not precision.fp8_min_gain:
        return Fp8LayerChoice(reason="--fp8-min-gain 0")
    if saved is not None and saved.named.fp8:
        return Fp8LayerChoice(saved.bf16_linears or (), "as in the checkpoint")
    if training.deterministic:
        return Fp8LayerChoice(reason="--deterministic: measured times are not reproducible")
    times = times_by_slot(precision, layer_shapes(model, parallel, training.micro_batch_size), measure)
    if times is None:
        return Fp8LayerChoice(
            reason="not measured on this GPU" if _has_fp8() else "not measured: this hardware has no FP8, which is emulated"
        )
    groups = [LINEARS] if precision.fuses(model, precision.recipe) else [(slot,) for slot in LINEARS]
    gains = {slot: sum(times[s].bf16 for s in group) / sum(times[s].fp8 for s in group) for group in groups for slot in group}
    slow = tuple(slot for slot in LINEARS if gains[slot] < precision.fp8_min_gain)
    return Fp8LayerChoice(slow, f"measured, --fp8-min-gain {precision.fp8_min_gain:g}", gains)


def choose_attention(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    micro_batch_size: int,
    measure: Measure | None,
    saved: PrecisionConfig | None = None,
    refused: str | None = None,
) -> tuple[str, str]:
    """Return the precision of the attention core for a run with `--attention-precision auto`, and the reason, on one process.

    The first of these decides: what FP8 attention does not support, `--fp8-min-gain` 0, the checkpoint, this machine, the gain.

    Args:
        model, parallel, precision, measure, saved: as in `choose`.
        refused: why other flags of the run exclude FP8 attention; None if they do not.
    """
    if not precision.named.fp8:
        return "bf16", f"precision {precision.name}"
    if refused is not None:
        return "bf16", refused
    if not precision.fp8_min_gain:
        return "fp8", "--fp8-min-gain 0"
    if saved is not None and saved.named.fp8:
        return saved.attention_precision, "as in the checkpoint"
    if not _has_fp8():
        return "bf16", "not measured: this hardware has no FP8, which is emulated"
    from megatron.lm.model.attention import prepare_fp8  # megatron-core, for seconds

    try:
        prepare_fp8(model, parallel, micro_batch_size)
    except ValueError as error:
        return "bf16", str(error)
    shape = attention_shape(model, parallel, micro_batch_size)
    frontend = next((found.version for found in importlib.metadata.distributions(name="nvidia-cudnn-frontend")), "none")
    kernels = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, frontend {frontend}"
    key = f"{torch.cuda.get_device_name()}, {kernels}, attention, {' x '.join(map(str, shape))}"
    times = _cached(precision, {key: shape}, measure)
    if times is None:
        return "bf16", "not measured on this GPU"
    gain = times[key].bf16 / times[key].fp8
    return "fp8" if gain >= precision.fp8_min_gain else "bf16", f"gain {gain:.2f}, --fp8-min-gain {precision.fp8_min_gain:g}"


def attention_shape(model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int) -> AttentionShape:
    """Return the shape of the attention core on one rank for one micro-batch. With a ring of context-parallel ranks it covers a rank's
    own tokens; with an all-to-all, a rank's heads of whole sequences."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ranks, parts = (tp * cp, 1) if parallel.shares_heads else (tp, cp)
    heads, groups = model.num_attention_heads // ranks, max(1, model.query_groups // ranks)
    return AttentionShape(micro_batch_size, model.seq_length // parts, heads, groups, model.head_size)


def decide(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    training: TrainingConfig,
    measure: Measure | None,
    saved: SavedPrecision = lambda: None,
    refused: str | None = None,
) -> tuple[PrecisionConfig, Fp8LayerChoice]:
    """Resolve the open precision settings on one process: operand scaling and state rounding from the checkpoint, and the FP8 layers.

    Args:
        model, parallel, precision, training, measure: as in `choose`.
        saved: returns the settings of the run that is resumed, or None; called if something is in FP8 or optimizer states are narrower
            than FP32.
        refused: as in `choose_attention`.

    Raises:
        ValueError: if the checkpoint's operand scaling contradicts the flags.
    """
    named = precision.named
    before = saved() if named.fp8 or any(named.states.rounded().values()) else None
    precision = with_saved_rounding(with_saved_scaling(precision, before), before)
    choice = choose(model, parallel, precision, training, measure, before)
    if precision.attention_precision == MEASURED:
        attention, reason = choose_attention(model, parallel, precision, training.micro_batch_size, measure, before, refused)
        choice = replace(choice, attention=f"attention: {attention.upper()}; {reason}")
        precision = replace(precision, attention_precision=attention)
    return replace(precision, bf16_linears=choice.bf16) if named.fp8 else precision, choice


def describe(model: ModelConfig, precision: PrecisionConfig, choice: Fp8LayerChoice) -> str:
    """Return a line with the number of linear layers of the whole model (without the LM head) in each precision, and the reason."""
    counts, wide = [], precision.layers_in_bf16(model.num_layers)
    for name, slots in (("FP8", [s for s in LINEARS if s not in choice.bf16]), ("BF16", choice.bf16)):
        gains = {slot: f"{choice.gains[slot]:.2f}" for slot in slots if slot in choice.gains}
        alike = f"gain {next(iter(gains.values()))}" if len(set(gains.values())) == 1 else ""
        details = (
            alike or ", ".join(f"{slot} {gain}" for slot, gain in gains.items()) or (", ".join(slots) if choice.bf16 and slots else "")
        )
        number = sum(linear_layers(model, slot, wide) for slot in slots)
        if name == "BF16":
            number += linear_layers(model) - linear_layers(model, without=wide)
            numbers = ", ".join(str(layer + 1) for layer in sorted(wide))
            details = "; ".join(filter(None, (details, f"layers {numbers} as a whole" if wide else "")))
        counts.append(f"{number} {name}" + (f" ({details})" if details else ""))
    if not precision.named.fp8:
        by = "of Transformer Engine" if isinstance(precision.named, PeerRecipe) else str(precision.named.compute)
        counts = [f"{linear_layers(model)} {by}"]
    smooth = ""
    if precision.smooth_swiglu:
        smooth = "; no Smooth-SwiGLU, since linear_fc2 is BF16" if "linear_fc2" in choice.bf16 else "; Smooth-SwiGLU"
    return f"linear layers: {', '.join(counts)}{smooth}; {choice.reason}"


def linear_layers(model: ModelConfig, slot: str | None = None, without: Collection[int] = ()) -> int:
    """Return the number of linear layers of the whole model, the LM head and experts excepted.

    Args:
        slot: only these; None: of all slots.
        without: layers, from 0, that do not count.
    """
    if slot is None:
        return sum(linear_layers(model, each, without) for each in LINEARS)
    dense = [n for n in range(model.num_layers) if n not in without]
    if slot in ("linear_fc1", "linear_fc2") and model.moe_shared_expert_intermediate_size is None:
        dense = [n for n in dense if n not in model.moe_layers]
    return len(dense)


def describe_experts(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig) -> str | None:
    """Return a line about the experts of the whole model, which of them a process has, and how tokens reach the others; None for a dense
    model."""
    recipe, size, shared = precision.named, parallel.expert_model_parallel_size, model.moe_shared_expert_intermediate_size
    if model.num_experts is None:
        return None
    wide = len(model.moe_layers) - len(precision.fp8_experts(model)) if recipe.fp8 else 0
    stored = f"in FP8{f', of {wide} layers in BF16' if wide else ''}" if recipe.fp8 else f"in {recipe.compute}"
    beside = f", and a shared one of width {shared}" if shared else ""
    fused = "; their attention runs unfused" if precision.fuses(model, precision.recipe) else ""
    spread = "every process has all of its layers' experts"
    if size > 1:
        asked = parallel.moe_wire or "fp8"
        wire = asked.partition("-")[0].upper() if recipe.fp8 else recipe.compute
        sums = ", as their sums return" if asked == "fp8-sums" else ""
        spread = f"every process has {model.num_experts // size} of them, and gathers the tokens of {size} processes in {wire}{sums}"
    return (
        f"mixture of experts: {len(model.moe_layers)} of {model.num_layers} layers, each with {model.num_experts} experts of width "
        f"{model.expert_size} {stored}, {model.moe_router_topk} per token{beside}; {spread}{fused}"
    )


def measure(shape: Shape | AttentionShape, recipe: Recipe) -> Times:
    """Time one linear layer, or the attention core, on this GPU, forward and backward with all casts, without host time: medians over CUDA
    graph replays."""
    device = torch.device("cuda", torch.cuda.current_device())
    times = _measure_attention(shape, recipe, device) if isinstance(shape, AttentionShape) else _measure_linear(shape, recipe, device)
    torch._C._cuda_clearCublasWorkspaces()  # one per stream that ran a GEMM, about 64 MiB in all
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return times


def _measure_attention(shape: AttentionShape, recipe: Recipe, device: torch.device) -> Times:
    """Times of causal attention. FP8's include casts of queries, keys and values, which a fused layer does while it rotates them."""
    from megatron.lm.model.attention import BACKENDS  # megatron-core, for seconds

    assert recipe.gemm is not None
    batch, tokens, heads, groups, channels = shape
    with torch.random.fork_rng([device]):
        query, grad, key, value = (
            torch.randn(tokens, batch, n, channels, device=device, dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, heads, groups, groups)
        )
    grad = grad.detach().flatten(2)
    scaling = AttentionScaling(recipe.gemm, device=device)
    state, fp8 = ScalingState(scaling), FP8Attention(scaling, default_scale(channels), True, True)

    def wide() -> None:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with sdpa_kernel(BACKENDS["auto"], set_priority=True):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
        torch.autograd.grad(o.permute(2, 0, 1, 3).flatten(2), (query, key, value), grad)

    def low() -> None:
        torch.autograd.grad(fp8(query, key, value), (query, key, value), grad)

    while not scaling.delayed:
        low()
        state.roll()
    return Times(_seconds(wide), _seconds(low))


def _measure_linear(shape: Shape, recipe: Recipe, device: torch.device) -> Times:
    with torch.random.fork_rng([device]):  # dropout must not depend on whether this run measures
        x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(shape.tokens, shape.outputs, device=device, dtype=torch.bfloat16)
        plain = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device, dtype=torch.bfloat16)
    low = FP8Linear.from_linear(plain, recipe)
    state = ScalingState(low)

    def both(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

    for _ in range(low.scaling.window + 1):  # delayed scaling uses just-in-time scales until its window is full
        both(low)
        state.roll()
    return Times(_seconds(lambda: both(plain)), _seconds(lambda: both(low)))


def _seconds(run: Callable[[], None]) -> float:
    """Return the median time of `REPEATS` replays of a CUDA graph of `run`, each with a cold L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, cache = torch.cuda.CUDAGraph(), torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    with capturing(graph, stream=stream):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in marks:
        cache.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3
