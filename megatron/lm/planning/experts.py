"""Memory of a mixture of experts on one process: the tensors that its layers keep for backward, and what backward needs in addition.

With H the width of the residual stream, F the width of one expert, k experts per token, E experts, a the bytes of the compute dtype, a
layer keeps these bytes per token:

    router       a H              its input, which in BF16 the experts' products read through copies
                 4 E each         scores before top-k or of sigmoid, scores of the auxiliary loss, logits of the z loss
                 16 k             probabilities and choices
    FP8 experts  H                the input in E4M3, once per token
                 2 a F k          FC1's output
                                  none with `--recompute-modules mlp`, which computes it again for one layer at a time
    others       a H k            a copy of the input per choice
                 (16 + a) F k     gate, up, silu(gate) and both products in FP32; FC2's input
    all          16 k             order of the rows

A process that shares the experts with N - 1 others (`--expert-model-parallel-size N`) has rows for the choices of all N, and the input of
all N.
With sequence parallelism a process routes its part of the sequence only. The shared expert is a dense MLP. Beside the activations FP8
experts keep their weights once more by columns, cast once per step, and by rows too if they are not stored in E4M3: E 3 F H bytes of a
layer, or twice that.
"""

from megatron.lm.config import Config
from megatron.lm.config.sections.precision import saved_activations
from msamp.nn.unfused import ActivationFunction

ORDER, CHOICE = 16, 16  # bytes per choice: offsets, source and places of its row; probability, its gradient's index, expert


def in_fp8(config: Config) -> bool:
    """Return whether the experts of a model with identical layers (`of_layers`) are in FP8."""
    return bool(config.precision.fp8_experts(config.model))


def of_rank(config: Config) -> int:
    """Return the number of experts of a layer on one process."""
    assert config.model.num_experts is not None
    return config.model.num_experts // config.parallel.expert_model_parallel_size


def recomputes_fc1(config: Config) -> bool:
    """Return whether backward computes the output of the experts' FC1 again (`--recompute-modules mlp`)."""
    shared = config.model.moe_shared_expert_intermediate_size  # its layer recomputes its whole MLP (`megatron.lm.model.moe.layer`)
    return in_fp8(config) and "mlp" in config.training.recomputed_modules and shared is None


def own_tokens(config: Config) -> float:
    """Return the tokens of a micro-batch that a process routes: with sequence parallelism its part of them."""
    parallel = config.parallel
    return config.tokens / (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def kept_per_token(config: Config, cast: float) -> float:
    """Return the bytes per token that the mixture of experts of a layer keeps for backward, without the input of its router.

    cast: bytes per element of the inputs of the shared expert's linear layers.
    """
    model = config.model
    assert model.num_experts is not None
    scores = model.moe_router_pre_softmax + (model.moe_router_score_function == "sigmoid")
    scores += bool(model.moe_aux_loss_coeff) + bool(model.moe_z_loss_coeff)
    router = 4 * model.num_experts * scores + CHOICE * model.moe_router_topk
    return (router + kept_by_rows(config)) * own_tokens(config) / config.tokens + _shared(config, cast)


def kept_by_rows(config: Config) -> float:
    """Return the bytes per token that a process routes which the experts of a layer keep for rows, of all processes that share them."""
    model, wide = config.model, config.precision.named.compute.bytes
    top_k, width, hidden = model.moe_router_topk, model.expert_size, model.hidden_size
    rows = 2 * wide * width if in_fp8(config) else wide * hidden + (16 + wide) * width
    rows = 0 if recomputes_fc1(config) else rows
    gathered = hidden if in_fp8(config) else wide * hidden if config.parallel.expert_model_parallel_size > 1 else 0
    return config.parallel.expert_model_parallel_size * (gathered + top_k * (rows + ORDER))


def _shared(config: Config, cast: float) -> float:
    """Return the bytes per token of the shared expert; 0 without one."""
    model, wide, tp = config.model, config.precision.named.compute.bytes, config.parallel.tensor_model_parallel_size
    size = model.moe_shared_expert_intermediate_size
    if size is None:
        return 0
    own_input = cast * model.hidden_size if cast < wide else 0  # in BF16 it is the router's
    seen = ActivationFunction.saved_bytes(2 * size / tp, wide, saved_activations(config.precision))
    return own_input + seen + cast * size / tp


def weights_by_columns(config: Config) -> int:
    """Return the bytes of a layer's expert weights as operands of the products, in addition to the stored weights; 0 without FP8
    experts."""
    if not in_fp8(config):
        return 0
    layouts = 1 if config.precision.recipe.weight.bytes == 1 else 2
    return layouts * elements(config)


def backward_of_a_layer(config: Config, tokens: int) -> int:
    """Return the peak bytes of temporaries in backward of a layer with experts, for `tokens` tokens.

    Per token: the gradients of the layer's output and of the residual stream. FP8: the first in E5M2 per token and by columns per choice,
    and per choice the gradient of FC2's input (a), that of FC1's output in E5M2 by rows and by columns, FC2's input by columns. Others: per
    choice the gradients of rows and of SwiGLU's parts in FP32. And the weight gradients of all experts, in the compute dtype.
    """
    model, wide = config.model, config.precision.named.compute.bytes
    hidden, width = model.hidden_size, model.expert_size
    per_choice = hidden + (wide + 5) * width if in_fp8(config) else wide * hidden + (2 * wide + 12) * width
    per_token = 2 * wide * hidden + config.parallel.expert_model_parallel_size * (
        (hidden if in_fp8(config) else 0) + model.moe_router_topk * per_choice
    )
    return tokens * per_token + wide * elements(config)


def elements(config: Config) -> int:
    """Return the elements of the weights of a layer's experts on one process."""
    return of_rank(config) * 3 * config.model.expert_size * config.model.hidden_size
