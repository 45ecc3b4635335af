"""Choose the linear layers of an FP8 recipe that run in FP8: those that are faster in FP8 on this GPU, by measurements cached per machine.

A layer's gain is its BF16 time for forward and backward divided by its FP8 time including all casts, at its own shape and token count. If
a transformer layer runs as two fused blocks, its four linear layers are all FP8 or all BF16, by the sum of their times. Rank 0 decides for
all ranks. The configuration records the choice (`--bf16-linears`), and so does the checkpoint, so a resume on another machine computes the
same. The operand scaling is taken from the checkpoint in the same way (`decide`).

`--attention-precision auto` is decided by the same rule, from the times of the attention core at the run's shape (`choose_attention`): FP8
attention wins at some lengths and numbers of heads and loses at others.
"""

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.lm.config import LINEARS, ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.from_checkpoint import with_saved_rounding, with_saved_scaling
from megatron.lm.config.presets import linear_shapes
from megatron.lm.config.sections.baselines import PeerRecipe
from megatron.lm.config.sections.precision import MEASURED
from msamp.kernels.fp8_attention import default_scale
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention
from msamp.nn.layer_gains import Measure, Shape, Times, cached, has_fp8, key_of, measure_linear, seconds
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import Recipe


class AttentionShape(NamedTuple):
    """Shape of the attention core on one rank: sequences, tokens of each, heads, groups of heads that share a key, channels of a head."""

    batch: int
    tokens: int
    heads: int
    groups: int
    channels: int


SavedPrecision = Callable[[], PrecisionConfig | None]


@dataclass(frozen=True)
class Fp8LayerChoice:
    """The linear layers of a transformer layer that are BF16 (slots in the order of `LINEARS`), the reason, and the measured gains by
    slot; and what `--attention-precision auto` chose, with its reason, or an empty text without it."""

    bf16: tuple[str, ...] = ()
    reason: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)
    attention: str = ""


def layer_shapes(model: ModelConfig, parallel: ParallelConfig, micro_batch_size: int) -> dict[str, Shape]:
    """Return the shapes of a transformer layer's linear layers by slot, on one tensor-parallel rank for one micro-batch."""
    tokens, sizes = model.seq_length // parallel.context_parallel_size * micro_batch_size, linear_shapes(model, parallel)
    return {slot: Shape(tokens, inputs, outputs) for slot, (outputs, inputs) in sizes.items()}


def default_measure() -> Measure | None:
    """Return `measure` on hardware with FP8, else None: emulated FP8 has no gain."""
    return measure if has_fp8() else None


def times_by_slot(precision: PrecisionConfig, shapes: Mapping[str, Shape], measure: Measure | None) -> dict[str, Times] | None:
    """Return the times from the cache file; measure and add missing ones. None if some are missing and `measure` is None."""
    recipe = precision.recipe
    keys = {slot: key_of(shape, recipe) for slot, shape in shapes.items()}
    times = cached(precision.fp8_gain_cache, {keys[slot]: shape for slot, shape in shapes.items()}, recipe, measure)
    return times and {slot: times[key] for slot, key in keys.items()}


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
            reason="not measured on this GPU" if has_fp8() else "not measured: this hardware has no FP8, which is emulated"
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
    if not has_fp8():
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
    times = cached(precision.fp8_gain_cache, {key: shape}, precision.recipe, measure)
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
        saved: returns the settings of the run that is resumed, or None.
        refused: as in `choose_attention`.

    Raises:
        ValueError: if the checkpoint's operand scaling, or the paper that it follows, contradicts the flags.
    """
    named, before = precision.named, saved()
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
    times = _measure_attention(shape, recipe, device) if isinstance(shape, AttentionShape) else measure_linear(shape, recipe)
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
    return Times(seconds(wide), seconds(low))
