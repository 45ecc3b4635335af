"""Rules for the recipe: the flags must select one, and vary only what it allows."""

from dataclasses import fields, replace

from megatron.lm.config.sections.precision import COAT_FORMATS, LINEARS, MEASURED, OPTIMIZER_STATES, PrecisionConfig
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules

STATE_FIELDS = ("optimizer_state", "master_format", "grad_format", "exp_avg_format", "exp_avg_sq_format")
LOSS_SCALE_FIELDS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
USE_FP8 = "drop it, or use --opt-level O1, O2 or O3"


def refusal(precision: PrecisionConfig) -> str | None:
    """Return why the flags define no valid recipe; None if they do."""
    try:
        _ = precision.recipe
    except ValueError as error:
        return str(error)
    return None


def one_recipe(config: Config, world_size: int) -> Problems:
    """All flags that select a recipe must select the same one, and it must support the formats of the flags."""
    precision = config.precision
    if precision.contradiction is not None:
        yield precision.contradiction
        return
    named = precision.named
    for name in ("exp_avg_format", "exp_avg_sq_format"):
        value = getattr(precision, name)
        if precision.optimizer_state is not None and value not in (None, *COAT_FORMATS):
            fix = f"drop one, or choose {' or '.join(COAT_FORMATS)}"
            yield f"--optimizer-state {precision.optimizer_state} contradicts {flag(name)} {value}: {fix}"
    given = {name: getattr(precision, name) for name in STATE_FIELDS if getattr(precision, name) is not None}
    fixed = {name: value for name, value in given.items() if not named.fp8 and value not in (*COAT_FORMATS, *OPTIMIZER_STATES)}
    for name, value in fixed.items():
        yield f"{flag(name)} {value} contradicts precision {named.name}, which fixes its formats: {USE_FP8}"
    problem = refusal(replace(precision, fp8_fast_accumulation=None))  # not about formats: see `fp8_scaling`
    if problem is not None and not fixed:
        flags = " ".join(f"{flag(name)} {value}" for name, value in given.items())
        yield f"{flags} contradicts precision {named.name}: {problem}; drop it, or use --precision bf16"


def fp8_linears(config: Config, world_size: int) -> Problems:
    """Flags that choose or measure the FP8 linear layers need a recipe with FP8 GEMMs."""
    precision = config.precision
    if precision.contradiction is not None:
        return
    if precision.named.fp8:
        nothing = precision.bf16_linears is not None and precision.attention_precision != MEASURED
        if precision.fp8_gain_cache is not None and (nothing or not precision.fp8_min_gain):
            ground = "--bf16-linears" if nothing else "--fp8-min-gain 0"
            yield f"--fp8-gain-cache {precision.fp8_gain_cache} has no effect with {ground}, which leaves nothing to measure: drop one"
        return
    for name in ("fp8_gain_cache", "bf16_linears"):
        value = getattr(precision, name)
        if value is not None:
            given = " ".join(value) if isinstance(value, tuple) else value
            yield f"{flag(name)} {given} applies to FP8 linear layers, and precision {precision.name} has none: {USE_FP8}"


def layers_in_bf16(config: Config, world_size: int) -> Problems:
    """Keeping whole layers in BF16 requires our FP8 layers, of which at least one stays FP8."""
    precision, layers = config.precision, config.model.num_layers
    counts = {name: getattr(precision, name) for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
    if not precision.first_last_layers_bf16:
        for name, count in counts.items():
            if count != 1:
                yield f"{flag(name)} {count} has no effect without --first-last-layers-bf16: add it, or drop this"
        return
    if precision.contradiction is None and not precision.named.fp8:
        yield f"--first-last-layers-bf16 applies to FP8 linear layers, and precision {precision.name} has none: {USE_FP8}"
    given = " and ".join(f"{flag(name)} {count}" for name, count in counts.items())
    if sum(counts.values()) >= layers:
        yield f"{given} leave none of the {layers} layers in FP8: give fewer, or use --bf16"
    if not sum(counts.values()):
        yield f"{given} leave all layers in FP8: give one of them, or drop --first-last-layers-bf16"


def smooth_swiglu(config: Config, world_size: int) -> Problems:
    """Smooth-SwiGLU scales the channels of a SwiGLU that enter an FP8 layer with a delayed scale."""
    from megatron.lm.config.sections.baselines import PeerRecipe
    from megatron.lm.config.sections.precision import gemm_of

    precision = config.precision
    if not precision.smooth_swiglu or precision.contradiction is not None:
        return
    given = "--smooth-swiglu"
    if not config.model.swiglu:
        yield f"{given} scales the output of SwiGLU, and the activation is {config.model.activation}: add --swiglu, or drop it"
    if config.model.num_experts is not None:
        yield f"{given} is not built for experts (--num-experts {config.model.num_experts}), whose channels have no scales: drop one"
    if not precision.named.fp8 or isinstance(precision.named, PeerRecipe):
        yield f"{given} applies to our FP8 linear layers, and precision {precision.name} has none: {USE_FP8}"
        return
    if "linear_fc2" in (precision.bf16_linears or ()):
        yield f"{given} scales the input of linear_fc2, which --bf16-linears keeps in BF16: drop one"
    gemm = gemm_of(replace(precision, fp8_fast_accumulation=None))
    if gemm is not None and not (gemm.tensorwise and gemm.input.scaling.window):
        by = f"--fp8-recipe {precision.fp8_recipe}" if precision.fp8_recipe else f"precision {precision.name}"
        yield f"{given} requires delayed scales, and {by} casts the input as {gemm.input}: use --fp8-recipe delayed, or drop it"


def fp8_guard(config: Config, world_size: int) -> Problems:
    """The guard measures and raises our FP8 linear layers, and its settings need it."""
    from megatron.lm.config.sections.baselines import PeerRecipe

    precision = config.precision
    if not precision.fp8_guard:
        for f in fields(precision):
            if f.name.startswith("fp8_guard_") and getattr(precision, f.name) != f.default:
                yield f"{flag(f.name)} {getattr(precision, f.name):g} has no effect without --fp8-guard: add it, or drop this"
        return
    if precision.contradiction is None and (not precision.named.fp8 or isinstance(precision.named, PeerRecipe)):
        yield f"--fp8-guard raises our FP8 linear layers, and precision {precision.name} has none: {USE_FP8}"
    if config.model.num_experts is not None:
        yield f"--fp8-guard is not built for experts (--num-experts {config.model.num_experts}), whose GEMMs it cannot raise: drop one"
    if set(precision.bf16_linears or ()) == set(LINEARS):
        yield "--fp8-guard raises FP8 linear layers, and --bf16-linears keeps all of them in BF16: drop one"


def fp8_scaling(config: Config, world_size: int) -> Problems:
    """Flags for the scaling of operands need FP8 GEMMs, and each setting of a scaling rule needs a rule that has it."""
    from megatron.lm.config.sections.baselines import PeerRecipe
    from megatron.lm.config.sections.precision import RULE_SETTINGS, gemm_of, rule_setting

    precision = config.precision
    if precision.contradiction is not None:
        return
    # "output" was the default before 2026-12: checkpoints of any precision have it.
    fast = f"--fp8-fast-accumulation {precision.fp8_fast_accumulation}" if precision.fp8_fast_accumulation not in (None, "output") else ""
    if not precision.named.fp8:
        if fast:
            yield f"{fast} contradicts precision {precision.name}, which does not use our FP8 layers: {USE_FP8}"
        head = precision.output_layer_precision
        if head != "bf16":
            yield f"--output-layer-precision {head} contradicts precision {precision.name}, which has no FP8: {USE_FP8}"
        why = "which scales as Transformer Engine does" if isinstance(precision.named, PeerRecipe) else "which has no FP8"
        for name in ("fp8_recipe", *RULE_SETTINGS):
            value = getattr(precision, name)
            if value is not None:
                yield f"{flag(name)} {value} contradicts precision {precision.name}, {why}: {USE_FP8}"
        return
    gemm = gemm_of(replace(precision, fp8_fast_accumulation=None))
    if precision.fp8_fast_accumulation == "all" and gemm is not None and not gemm.tensorwise:
        yield (
            f"{fast} applies to per-tensor scales, and blocks are always accumulated in full precision: drop it, or use --fp8-recipe "
            "delayed"
        )
        return  # the recipe cannot be built
    for name in RULE_SETTINGS:
        value = getattr(precision, name)
        if value is not None and rule_setting(precision, name) is None:
            by = f"--fp8-recipe {precision.fp8_recipe}" if precision.fp8_recipe else f"precision {precision.name}"
            yield f"{flag(name)} {value} applies to delayed scaling, and {by} scales just in time: drop it, or use --fp8-recipe delayed"


def loss_scaling(config: Config, world_size: int) -> Problems:
    """A loss scale requires FP16, and flags of a dynamic one contradict a constant one."""
    precision = config.precision
    if precision.contradiction is not None:
        return
    given = [f.name for f in fields(precision) if f.name in LOSS_SCALE_FIELDS and getattr(precision, f.name) != f.default]
    for name in given:
        value = getattr(precision, name)
        if not precision.named.scales_loss:
            yield f"{flag(name)} {value:g} applies to FP16, and precision {precision.name} has no loss scale: drop it, or use --fp16"
        elif precision.loss_scale is not None and name != "loss_scale":
            yield f"{flag(name)} {value:g} applies to a dynamic loss scale, and --loss-scale {precision.loss_scale:g} is constant: drop one"
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is larger than --initial-loss-scale {precision.initial_loss_scale:g}: "
            "lower it, or start higher"
        )


def peer_layers(config: Config, world_size: int) -> Problems:
    """A baseline's library must be installed, and its recipe excludes flags of our own layers and states."""
    from megatron.lm.config.sections.baselines import INSTALL, PeerRecipe, installed

    precision, named = config.precision, None if config.precision.contradiction else config.precision.named
    if not isinstance(named, PeerRecipe):
        return
    if not installed():
        yield f"precision {named.name} requires Transformer Engine, which is not installed: {INSTALL}, or use bf16 or O1 to O3"
    for name in ("optimizer_state", "exp_avg_format", "exp_avg_sq_format"):
        value = getattr(precision, name)
        if value in (*COAT_FORMATS, *OPTIMIZER_STATES):  # every recipe without our FP8 refuses the other formats
            yield f"{flag(name)} {value} is a format of COAT, and precision {named.name} has FP32 states: drop it, or use --precision bf16"
    ours = "which Transformer Engine's layers do not use"
    if precision.save_activations not in (None, named.activations):
        yield (
            f"--save-activations {precision.save_activations} applies to our norms and activation functions, {ours}: drop it, or use "
            "--precision coat"
        )
    if config.model.attention_backend != "auto":
        yield (
            f"--attention-backend {config.model.attention_backend} applies to our attention core, {ours}: drop it; Transformer Engine "
            "chooses"
        )
    if config.model.qk_layernorm:
        yield f"--qk-layernorm adds our norms of queries and keys, {ours}: drop it, or use --precision bf16"
    if config.training.cuda_graph not in (None, "none"):
        yield f"--cuda-graph {config.training.cuda_graph} captures our layers but not Transformer Engine's: drop it to run steps eagerly"
    if config.training.deterministic:
        yield f"--deterministic does not apply to Transformer Engine's kernels (precision {named.name}): drop it, or use bf16 or O1 to O3"
    if config.checkpoint.load is not None and not config.checkpoint.finetune and named.keeps_history:
        yield (
            f"--load {config.checkpoint.load}: checkpoints do not contain the amax histories of Transformer Engine (precision "
            f"{named.name}): add --finetune to start from the weights, or use te-current"
        )


def fp8_attention(config: Config, world_size: int) -> Problems:
    """FP8 attention has one kernel, which is causal, has no dropout and supports certain head widths."""
    from msamp.kernels.fp8_attention import MULTIPLE, WIDEST

    precision, model = config.precision, config.model
    if precision.attention_precision != "fp8" or precision.contradiction is not None:
        return
    given = "--attention-precision fp8"
    if not precision.named.fp8:
        yield f"{given} contradicts precision {precision.name}, which has no FP8: {USE_FP8}"
    if model.attention_backend != "auto":
        yield f"{given} has its own kernel, and --attention-backend {model.attention_backend} names another: drop one"
    if model.attention_dropout:
        yield f"{given} does not support --attention-dropout ({model.attention_dropout:g}): drop one"
    if model.objective != "causal-lm":
        yield f"{given} does not mask padding, which --objective {model.objective} requires: drop one"
    if config.training.deterministic:
        yield f"{given} contradicts --deterministic, since its backward accumulates in no fixed order: drop one"
    if model.head_size % MULTIPLE or model.head_size > WIDEST:
        yield (
            f"{given} requires heads with a multiple of {MULTIPLE} channels up to {WIDEST}, and they have {model.head_size}: give other "
            "--kv-channels or --num-attention-heads, or drop it"
        )


RULES: Rules = {
    **dict.fromkeys((one_recipe, fp8_linears, fp8_scaling, loss_scaling), ("precision",)),
    layers_in_bf16: ("precision", "model"),
    smooth_swiglu: ("precision", "model"),
    fp8_guard: ("precision", "model"),
    peer_layers: ("precision", "model", "training", "checkpoint"),
    fp8_attention: ("precision", "model", "training"),
}
