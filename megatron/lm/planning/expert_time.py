"""Time of a mixture of experts on one process, from measured rates.

A process has E experts of width F and, with a balanced load, R = T k rows: k choices of T tokens of width H. With N processes that share
the experts it computes the tokens of all N, and has 1 / N of their choices. Per layer and micro-batch:

    products     18 (R + 64 E) F H / rate     three products, forward and two gradients; of 128 rows, half of an expert's last tile is empty
                 3 E F H * rate               reads of the weights and writes of their gradients, which few rows do not hide
    FP8 rows     (R + 64 E) (H * rate + F * rate), and a constant: copies and sums of rows, SwiGLU with its casts; their order
    other rows   N T k (20 H + 140 F) / rate  bytes of torch's kernels between the products, which work on the room for all choices
    router       18 T H / rate                bytes of its input and gradient in FP32, and a launch for each of some dozens of small kernels
    exchange     bytes and latency of the collectives (`megatron.lm.planning.wire.expert_parallel`), bytes of the sums of N processes

and per step the casts of the FP8 weights to operands, 3 E F H * rate. The rates of products are a fit to four models
(`tools/bench/results/grouped.csv`), rates of rows come from the layers of `experts.csv` and from a step at O0.

Loads were balanced in the benchmarks. How much slower an uneven load is is not known in general: products with Zipf's load take 5 to 9 %
longer, and with N processes all wait for the one with most rows. Nor are the FP32 products of the router counted. Eager steps, in which the
host launches kernels for every expert, are refused.
"""

from megatron.lm.config import Config
from megatron.lm.config.presets import linear_shapes
from megatron.lm.graphs import capture
from megatron.lm.planning import experts, memory, wire
from megatron.lm.planning.rates import Cluster, Rates
from msamp.kernels.reference.grouped_mm import GROUP_ALIGNMENT

PRODUCTS = 3  # gate, up and down
# Shares of computing FC1 again: two of three products of forward, and of the 4 bytes per weight (read twice in FP8, a gradient in BF16) two
# thirds of one.
RECOMPUTED_FLOPS, RECOMPUTED_WEIGHTS = 2 / 9, 1 / 6
# Bytes per row that torch's kernels move between the products in 16 bits, forward and backward: of H elements four copies of 2 + 2 bytes
# (rows and gradients, their masks) and two reads of sums; of F elements the FP32 copies of gate and up, silu, both products, the cast, and
# in backward the gradients of each, of the probabilities, and the concatenation of gate's and up's.
MOVED_HIDDEN, MOVED_WIDTH = 20, 140
# Kernels of a router: with neither loss, and in addition with the auxiliary loss and with the z loss (test_expert_time.py counts them).
KERNELS, KERNELS_AUX, KERNELS_Z = 25, 22, 20
KERNELS_SHARED = 10  # of packing and unpacking the choices that processes which share experts gather
FP32_COPIES = 18  # bytes per element of the router's input, cast to FP32 forward and backward, and of its gradient, cast back: 2 + 4 each


def refusal(config: Config) -> str | None:
    """Return why the time of a model's steps is unknown because of its experts; None if it is known."""
    if config.model.num_experts is None or memory.captured(config):
        return None
    why = capture.obstacle(config.model, config.parallel, config.precision, config.training) or "--cuda-graph none"
    return f"the planner has no measured rate for experts in eager steps ({why}): plan memory alone with --dry-run of msamp pretrain"


def of_a_layer(config: Config, rates: Rates) -> float:
    """Return the seconds of router and experts of a layer for a micro-batch, forward and backward, FC1 computed again where it is."""
    model, in_fp8 = config.model, experts.in_fp8(config)
    tokens, count = experts.own_tokens(config), experts.of_rank(config)
    rows, weights = tokens * model.moe_router_topk, experts.elements(config)
    padded = rows + GROUP_ALIGNMENT / 2 * count
    again = experts.recomputes_fc1(config)
    name = "grouped fp8" if in_fp8 else "grouped bf16"
    flops = 6 * padded * PRODUCTS * model.expert_size * model.hidden_size / rates(name)
    seconds = flops * (1 + RECOMPUTED_FLOPS * again) + weights * rates(f"{name}, weights") * (1 + RECOMPUTED_WEIGHTS * again)
    if in_fp8:
        hidden = padded * model.hidden_size * rates("copies of rows")
        seconds += hidden * (1 + again / 4) + padded * model.expert_size * rates("swiglu of rows") + rates("order of rows")
    else:
        moved = MOVED_HIDDEN * model.hidden_size + MOVED_WIDTH * model.expert_size
        seconds += rows * config.parallel.expert_model_parallel_size * moved / rates("unfused rows")
    balanced = model.moe_aux_loss_coeff and model.moe_router_load_balancing_type != "none"
    kernels = KERNELS + KERNELS_AUX * bool(balanced) + KERNELS_Z * bool(model.moe_z_loss_coeff)
    seconds += kernels * rates("launch") + FP32_COPIES * tokens * model.hidden_size / rates("copy")  # the router
    return seconds + _sums(config, rates, tokens)


def _sums(config: Config, rates: Rates, tokens: float) -> float:
    """Return the seconds of the kernels that accompany the collectives of processes that share experts: a process writes the sums of all N
    processes' tokens, which each adds up for its own, forward and backward; in FP8 the sums are measured and cast too."""
    ranks, wide = config.parallel.expert_model_parallel_size, config.precision.recipe.compute.bytes
    narrow = wire.bytes_of_expert_sums(config)
    if ranks == 1:
        return 0.0
    per_element = (ranks - 1) * wide + ranks * narrow + wide + (ranks * (2 * wide + narrow) if narrow < wide else 0)
    return 2 * tokens * config.model.hidden_size * per_element / rates("copy") + KERNELS_SHARED * rates("launch")


def exchange(config: Config, cluster: Cluster, layers: int) -> float:
    """Return the seconds per micro-batch that the processes which share experts send and wait in `layers` layers. In FP8 the sum of
    grad_input travels while FC1's weight gradient is computed; nothing else hides."""
    sent = wire.expert_parallel(config, layers)
    hidden = {"expert grad_input sum"} if experts.in_fp8(config) else set()
    axes = config.parallel.axes(cluster.gpus)
    link = cluster.link_between(axes.expert * axes.expert_tensor)
    return sum(one.size / link + one.calls * cluster.latency for kind, one in sent.items() if kind not in hidden)


def weights(config: Config) -> int:
    """Return the elements of the FP8 expert weights of a layer with experts on one process; 0 if they are in BF16."""
    return experts.elements(config) if experts.in_fp8(config) else 0


def casts_of_weights(config: Config, rates: Rates) -> float:
    """Return the seconds per step that the weights of a layer's FP8 experts take to become operands."""
    kept = config.precision.recipe.weight.bytes == 1
    return weights(config) * rates("transpose of a weight" if kept else "cast of experts")


def linears(config: Config) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of a transformer layer: with experts, only attention's and the shared expert's."""
    shapes = linear_shapes(config.model, config.parallel)
    if not config.model.moe_layers:
        return shapes
    size, tp = config.model.moe_shared_expert_intermediate_size or 0, config.parallel.tensor_model_parallel_size
    shared = {"linear_fc1": (2 * size // tp, config.model.hidden_size), "linear_fc2": (config.model.hidden_size, size // tp)}
    return {slot: shape for slot, shape in (shapes | shared).items() if all(shape)}
