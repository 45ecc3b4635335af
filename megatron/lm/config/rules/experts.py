"""Rules for mixtures of experts: what the router's flags must fit, and what is not supported yet."""

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.whole import Config, Problems, Rules


def router(config: Config, world_size: int) -> Problems:
    """The router's flags must fit the number of experts."""
    model = config.model
    if model.num_experts is None:
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
    yield from _groups(model, model.num_experts)


def _groups(model: ModelConfig, experts: int) -> Problems:
    groups, chosen, top_k = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
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
        return
    if (experts or tensor) != 1:
        given = (
            f"--expert-tensor-parallel-size {experts}" if experts else f"--tensor-model-parallel-size {tensor} splits each expert, which"
        )
        yield f"{given} is not supported yet: add --expert-tensor-parallel-size 1, with which each process has whole experts"
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


def spread(config: Config, world_size: int) -> Problems:
    """Experts that several processes share: their number, and what the processes send each other."""
    model, parallel = config.model, config.parallel
    size, wire = parallel.expert_model_parallel_size, parallel.moe_wire
    if size == 1 or model.num_experts is None:
        return
    if model.num_experts % size:
        yield f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {size}: choose a divisor"
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--expert-model-parallel-size {size} with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} would send each "
            "token several times: add --sequence-parallel, with which each process has its own part of a sequence"
        )
    if wire not in (None, "bf16") and refusal(config.precision) is None and not config.precision.fp8_experts(config.model):
        yield f"--moe-wire {wire} has no effect without experts in FP8: use --opt-level O1, O2 or O3, or drop it"


RULES: Rules = {
    router: ("model",),
    spread: ("model", "parallel", "precision"),
    supported: ("model", "parallel", "precision"),
}
