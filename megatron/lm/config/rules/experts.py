"""Rules for mixtures of experts: what the router's flags require of each other, and what is not supported yet, all in this file but for
`--smooth-swiglu`, whose own rule refuses experts."""

from dataclasses import fields

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules

_FLAGS = tuple(f for f in fields(ModelConfig) if f.name.startswith("moe_"))


def router(config: Config, world_size: int) -> Problems:
    """The router's flags need experts, and must fit their number."""
    model = config.model
    if model.num_experts is None:
        for f in _FLAGS:
            value = getattr(model, f.name)
            if value != f.default:
                given = flag(f.name) if value is True else f"{flag(f.name)} {value}"
                yield f"{given} has no effect without experts: add --num-experts N, or drop it"
        return
    try:
        if not model.moe_layers:
            yield f"--moe-layer-freq {model.moe_layer_freq} has no layer with experts: give one, or drop --num-experts"
    except ValueError as problem:
        yield str(problem)
    if model.moe_router_topk > model.num_experts:
        yield (
            f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {model.num_experts}: give 1 to {model.num_experts}, or "
            "more experts"
        )
    if model.moe_router_topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1: a softmax over one expert is always 1, so the router would not learn: add --moe-router-pre-softmax, or "
            "use --moe-router-score-function sigmoid"
        )
    if model.moe_router_pre_softmax and model.moe_router_score_function == "sigmoid":
        yield "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid: drop one of them"
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        yield f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff:g} has no effect with --moe-router-load-balancing-type none: drop one"
    yield from _bias(model)
    yield from _groups(model, model.num_experts)


def _bias(model: ModelConfig) -> Problems:
    if not model.moe_router_enable_expert_bias:
        if model.moe_router_bias_update_rate != type(model).moe_router_bias_update_rate:
            yield (
                f"--moe-router-bias-update-rate {model.moe_router_bias_update_rate:g} has no effect by itself: add "
                "--moe-router-enable-expert-bias, or drop it"
            )
    elif model.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias needs scores whose scale does not depend on the other experts: add "
            "--moe-router-score-function sigmoid, or drop it"
        )


def _groups(model: ModelConfig, experts: int) -> Problems:
    groups, chosen, top_k = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if (groups is None) != (chosen is None):
        name = "--moe-router-num-groups" if chosen is None else "--moe-router-group-topk"
        other = "--moe-router-group-topk" if chosen is None else "--moe-router-num-groups"
        yield f"{name} {groups or chosen} has no effect by itself: add {other}, or drop it"
    if groups is None or chosen is None:
        return
    if experts % groups:
        yield f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}: choose a divisor of {experts}"
    elif chosen > groups:
        yield f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}: give 1 to {groups}"
    elif top_k % chosen:
        yield f"--moe-router-topk {top_k} is not divisible by --moe-router-group-topk {chosen}: choose a divisor of {top_k}"
    elif top_k // chosen > experts // groups:
        yield (
            f"--moe-router-topk {top_k} does not fit {chosen} groups of {experts // groups} experts: raise --moe-router-group-topk, or "
            "lower --moe-router-num-groups"
        )


def supported(config: Config, world_size: int) -> Problems:
    """Refuse by name what mixtures of experts do not support yet."""
    from megatron.lm.config.sections.baselines import PeerRecipe  # torch

    model, parallel, precision = config.model, config.parallel, config.precision
    tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if model.num_experts is None:
        if experts is not None:
            yield f"--expert-tensor-parallel-size {experts} has no effect without experts: add --num-experts N, or drop it"
        return
    if (experts or tensor) != 1:
        given = (
            f"--expert-tensor-parallel-size {experts}" if experts else f"--tensor-model-parallel-size {tensor} splits each expert, which"
        )
        yield f"{given} is not supported yet: add --expert-tensor-parallel-size 1, with which each process has whole experts"
    if not model.swiglu:
        yield f"experts with {model.activation} are not supported yet: add --swiglu"
    if not model.disable_bias_linear:
        yield "experts with biases are not supported yet: add --disable-bias-linear"
    if model.objective != "causal-lm":
        yield f"--objective {model.objective} with --num-experts is not supported yet: use causal-lm, or drop the experts"
    if refusal(precision) is None:
        gemm = precision.recipe.gemm
        if isinstance(precision.named, PeerRecipe) or (gemm is not None and not gemm.fusible):
            yield (
                f"precision {precision.name} with --num-experts is not supported yet: experts need one scale per tensor, use --opt-level "
                "O0, O1, O2 or O3, with --fp8-recipe delayed or tensorwise"
            )
        elif gemm is not None and parallel.sequence_parallel and parallel.expert_model_parallel_size == 1:
            yield (
                "--sequence-parallel with --num-experts in FP8 is not supported yet, since FP8 gradients are not summed over the "
                f"tensor-parallel processes: add --expert-model-parallel-size {tensor}, drop it, or use --opt-level O0"
            )
    if config.checkpoint.ckpt_format != "own":
        yield f"--ckpt-format {config.checkpoint.ckpt_format} with --num-experts is not supported yet: use own"


def spread(config: Config, world_size: int) -> Problems:
    """Experts that several processes share: their number, and what the processes send each other."""
    model, parallel = config.model, config.parallel
    size, wire = parallel.expert_model_parallel_size, parallel.moe_wire
    if size == 1:
        if wire is not None:
            yield f"--moe-wire {wire} has no effect without expert parallelism: add --expert-model-parallel-size N, or drop it"
        return
    if model.num_experts is None:
        yield f"--expert-model-parallel-size {size} has no effect without experts: add --num-experts N, or drop it"
        return
    if model.num_experts % size:
        yield f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {size}: choose a divisor"
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--expert-model-parallel-size {size} with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} would send each "
            "token several times: add --sequence-parallel, with which each process has its own part of a sequence"
        )
    if config.communication.grad_exchange == "nccl":
        yield (
            f"--grad-exchange nccl with --expert-model-parallel-size {size} is not supported yet, since experts have fewer copies than the "
            "rest of the model: use fp32-sum"
        )
    if wire not in (None, "bf16") and refusal(config.precision) is None and not config.fp8_experts:
        yield f"--moe-wire {wire} has no effect without experts in FP8: use --opt-level O1, O2 or O3, or drop it"


RULES: Rules = {
    router: ("model",),
    spread: ("model", "parallel", "precision", "communication"),
    supported: ("model", "parallel", "precision", "checkpoint"),
}
