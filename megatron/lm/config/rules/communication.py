"""Rules for gradients between data-parallel processes and activations between tensor-parallel ones."""

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.sections.parallel import CommunicationConfig
from megatron.lm.config.sections.precision import FP8_FORMATS
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def fp8_gradients(config: Config, world_size: int) -> Problems:
    """An exchange other than the default, and sums of micro-batches in FP8, need FP8 gradients."""
    precision, exchange = config.precision, config.communication.exchange
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


def sums_at_the_owner(config: Config, world_size: int) -> Problems:
    """Accumulation on the owner is in FP32, and needs an exchange that sums in FP32."""
    precision, exchange = config.precision, config.communication.exchange
    if precision.grad_accum_on != "owner":
        return
    given = "--grad-accum-on owner"
    if precision.grad_accum_dtype is not None:
        yield f"{given} accumulates in FP32, and --grad-accum-dtype {precision.grad_accum_dtype} is for accumulation on each rank: drop one"
    if not exchange.sums_in_fp32:
        yield f"{given} requires sums in FP32, and --grad-exchange {exchange.name} has none: drop it, or use --grad-exchange fp32-sum"


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
    """Partial outputs in FP8 require O3, and operands in FP8 any level, with per-tensor scales. Each flag requires the parallelism that
    transfers the data."""
    parallel, precision = config.parallel, config.precision
    known = refusal(precision) is None
    sums, gathers = (known and precision.recipe.fp8_wire, "O3"), (known and precision.recipe.gathers_fp8, "O1, O2 or O3")
    several = ("--tensor-model-parallel-size above 1", parallel.tensor_model_parallel_size > 1)
    for name, default, (in_fp8, levels), (ground, there) in (
        ("tp_wire", "bf16", sums, several),
        ("tp_saved_input", "shard", gathers, ("--sequence-parallel", parallel.sequence_parallel)),
        ("tp_transport", "auto", gathers, several),
    ):
        value = getattr(parallel, name)
        by_blocks = known and (precision.named.fp8_wire if name == "tp_wire" else precision.named.fp8)
        level = "--fp8-recipe delayed or tensorwise" if by_blocks else f"--opt-level {levels}"
        lacking = [fix for fix, given in ((level, in_fp8), (ground, there)) if not given]
        if value != default and lacking:
            yield f"{flag(name)} {value} has no effect without {' and '.join(lacking)}: drop it, or add {' and '.join(lacking)}"


RULES: Rules = {
    fp8_gradients: ("precision", "communication"),
    sums_at_the_owner: ("precision", "communication"),
    overflow_guard: ("communication",),
    tensor_parallel_wire: ("parallel", "precision"),
}
