"""Rules for the recipe, which the flags must select and vary only as it allows, and for the formats in which processes send data."""

from dataclasses import replace

from megatron.lm.config.rules.table import conflicts
from megatron.lm.config.sections.parallel import CommunicationConfig
from megatron.lm.config.sections.precision import COAT_FORMATS, FP8_FORMATS, LINEARS, MEASURED, OPTIMIZER_STATES, PrecisionConfig, gemm_name
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules

STATE_FIELDS = ("optimizer_state", "master_format", "grad_format", "exp_avg_format", "exp_avg_sq_format")
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
    """Some linear layer must be in FP8: for the guard, for a cache of measured gains, and beside layers that stay in BF16."""
    precision, layers = config.precision, config.model.num_layers
    nothing = precision.bf16_linears is not None and precision.attention_precision != MEASURED
    if precision.fp8_gain_cache is not None and (nothing or not precision.fp8_min_gain):
        ground = "--bf16-linears" if nothing else "--fp8-min-gain 0"
        yield f"--fp8-gain-cache {precision.fp8_gain_cache} has no effect with {ground}, which leaves nothing to measure: drop one"
    if precision.fp8_guard and set(precision.bf16_linears or ()) == set(LINEARS):
        yield "--fp8-guard raises FP8 linear layers, and --bf16-linears keeps all of them in BF16: drop one"
    if not precision.first_last_layers_bf16:
        return
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    given = f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last}"
    if first + last >= layers:
        yield f"{given} leave none of the {layers} layers in FP8: give fewer, or use --bf16"
    if not first + last:
        yield f"{given} leave all layers in FP8: give one of them, or drop --first-last-layers-bf16"


def fp8_scaling(config: Config, world_size: int) -> Problems:
    """Each setting of a scaling rule needs a rule that has it, and Smooth-SwiGLU delayed scales."""
    from megatron.lm.config.sections.precision import RULE_SETTINGS, gemm_of, rule_setting

    precision = config.precision
    if precision.contradiction is not None or not precision.named.fp8:
        return
    by = f"--fp8-recipe {precision.fp8_recipe}" if precision.fp8_recipe else f"precision {precision.name}"
    gemm = gemm_of(replace(precision, fp8_fast_accumulation=None))
    if precision.smooth_swiglu and gemm is not None and not (gemm.tensorwise and gemm.input.scaling.window):
        yield f"--smooth-swiglu requires delayed scales, and {by} casts the input as {gemm.input}: use --fp8-recipe delayed, or drop it"
    if precision.fp8_fast_accumulation == "all" and gemm is not None and not gemm.tensorwise:
        yield (
            "--fp8-fast-accumulation all applies to per-tensor scales, and blocks are always accumulated in full precision: drop it, or "
            "use --fp8-recipe delayed"
        )
        return  # the recipe cannot be built
    for name in RULE_SETTINGS:
        value = getattr(precision, name)
        if value is not None and rule_setting(precision, name) is None:
            yield f"{flag(name)} {value} applies to delayed scaling, and {by} scales just in time: drop it, or use --fp8-recipe delayed"


def loss_scaling(config: Config, world_size: int) -> Problems:
    """The smallest loss scale must not be above the first."""
    precision = config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is larger than --initial-loss-scale {precision.initial_loss_scale:g}: "
            "lower it, or start higher"
        )


def peer_layers(config: Config, world_size: int) -> Problems:
    """A baseline's library must be installed, and its recipe excludes COAT's states and a resume without its histories."""
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
    if config.checkpoint.load is not None and not config.checkpoint.finetune and named.keeps_history:
        yield (
            f"--load {config.checkpoint.load}: checkpoints do not contain the amax histories of Transformer Engine (precision "
            f"{named.name}): add --finetune to start from the weights, or use te-current"
        )


def fp8_attention(config: Config, world_size: int) -> Problems:
    """FP8 attention supports certain head widths."""
    from msamp.kernels.fp8_attention import MULTIPLE, WIDEST

    width = config.model.head_size
    if config.precision.attention_precision == "fp8" and (width % MULTIPLE or width > WIDEST):
        yield (
            f"--attention-precision fp8 requires heads with a multiple of {MULTIPLE} channels up to {WIDEST}, and they have {width}: give "
            "other --kv-channels or --num-attention-heads, or drop it"
        )


def attention_refusal(config: Config) -> str | None:
    """Return why other flags of the run exclude FP8 attention; None if they do not."""
    fp8 = replace(config, precision=replace(config.precision, attention_precision="fp8"))
    return next(iter((*conflicts(fp8, about="attention_precision"), *fp8_attention(fp8, 1))), None)


def fp8_gradients(config: Config, world_size: int) -> Problems:
    """An exchange other than the default, and sums of micro-batches in FP8, need FP8 gradients."""
    precision, exchange = config.precision, config.communication.exchange
    if precision.grad_accum_on == "owner" and not exchange.sums_in_fp32:
        given = "--grad-accum-on owner requires sums in FP32"
        yield f"{given}, and --grad-exchange {exchange.name} has none: drop it, or use --grad-exchange fp32-sum"
    if refusal(precision) is not None:
        return
    named = precision.named
    if named.fp8 and precision.recipe.fp8_gradients:
        return
    own = precision.grad_format if named.fp8 else None
    lack = f"--grad-format {own} leaves none" if own else f"precision {named.name} has none"
    way = f"--grad-format {' or '.join(FP8_FORMATS)}" if named.fp8 else "--opt-level O1, O2 or O3"
    fix = f"drop {'one' if own else 'it'}, or use {way}"
    if exchange.name != CommunicationConfig.grad_exchange:
        yield f"--grad-exchange {exchange.name} sums FP8 gradients, and {lack}: {fix}"
    served = tuple(dict.fromkeys(("fp32", *(("bf16",) if named.fp8 else ()), named.accumulator)))
    if precision.grad_accum_dtype not in (None, *served):
        given = f"--grad-accum-dtype {precision.grad_accum_dtype}"
        yield f"{given} is for FP8 gradients, and {lack}: choose {' or '.join(served)}, {fix}"


def published(config: Config, world_size: int) -> Problems:
    """With `--as-published`, each setting that the paper fixes must have its value."""
    precision, paper = config.precision, config.precision.as_published
    if paper is None or precision.contradiction is not None:
        return
    named, given = precision.named, {**vars(precision), **vars(config.communication)}
    fixed = {"grad_exchange": named.exchange, "mu_rule": named.mu_rule, "grad_accum_dtype": named.accumulator, "grad_accum_on": "rank"}
    fixed |= {name: getattr(named.states, name) for name in ("master_rounding", "moment_rounding")}
    fixed |= {"grad_scaling": next(iter(config.communication.exchange.scalings), None)}
    fixed |= {"fp8_recipe": gemm_name(replace(precision, fp8_recipe=None)), "save_activations": named.activations}
    for name, value in fixed.items():
        if given[name] not in (None, value):
            yield f"--as-published {paper} contradicts {flag(name)} {given[name]}: drop one" + (f", or give {value}" if value else "")


def overflow_guard(config: Config, world_size: int) -> Problems:
    """Scaling and mu need the exchange that they guard."""
    from msamp.comm import exchange as exchanges
    from msamp.comm.grad_scaling import GRAD_SCALINGS

    communication, exchange = config.communication, config.communication.exchange
    scaling, mu_rule = communication.grad_scaling, communication.mu_rule
    adapting = [name for name in exchange.scalings if GRAD_SCALINGS[name].adapts]
    if not exchange.can_overflow:
        guarded = " or ".join(name for name in exchanges.names() if exchanges.by_name(name).can_overflow)
        for name, value in (("grad_scaling", scaling), ("mu_rule", mu_rule)):
            if value is not None:
                yield (
                    f"{flag(name)} {value} has no effect with --grad-exchange {exchange.name}, which cannot overflow and has no mu: "
                    f"drop it, or use --grad-exchange {guarded}"
                )
    elif scaling not in (None, *exchange.scalings):
        yield f"--grad-scaling {scaling} is not a scaling of --grad-exchange {exchange.name}: choose one of {', '.join(exchange.scalings)}"
    elif mu_rule is not None and communication.gradient_scaling not in adapting:
        fix = f"drop it{''.join(f', or use --grad-scaling {name}' for name in adapting)}"
        yield f"--mu-rule {mu_rule} has no effect with --grad-scaling {communication.gradient_scaling}, which has a fixed mu: {fix}"


def tensor_parallel_wire(config: Config, world_size: int) -> Problems:
    """Partial outputs in FP8 require O3, and operands in FP8 any level, with per-tensor scales."""
    parallel, precision = config.parallel, config.precision
    known = refusal(precision) is None
    gathers = known and precision.recipe.gathers_fp8
    for name, default, in_fp8, levels in (
        ("tp_wire", "bf16", known and precision.recipe.fp8_wire, "O3"),
        ("tp_saved_input", "shard", gathers, "O1, O2 or O3"),
        ("tp_transport", "auto", gathers, "O1, O2 or O3"),
    ):
        value = getattr(parallel, name)
        if value != default and not in_fp8:
            by_blocks = known and (precision.named.fp8_wire if name == "tp_wire" else precision.named.fp8)
            fix = "--fp8-recipe delayed or tensorwise" if by_blocks else f"--opt-level {levels}"
            yield f"{flag(name)} {value} has no effect without {fix}: drop it, or add {fix}"


RULES: Rules = {
    **dict.fromkeys((one_recipe, fp8_scaling, loss_scaling), ("precision",)),
    fp8_linears: ("precision", "model"),
    peer_layers: ("precision", "checkpoint"),
    fp8_attention: ("precision", "model"),
    fp8_gradients: ("precision", "communication"),
    published: ("precision", "communication"),
    overflow_guard: ("communication",),
    tensor_parallel_wire: ("parallel", "precision"),
}
