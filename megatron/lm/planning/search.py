"""Search the grids of a model that fit a cluster, fastest first.

Tensor parallelism stays within a host and uses sequence parallelism. Context parallelism stays within a host too, and is searched for
sequences longer than `LONG`: shorter ones are better divided between data-parallel ranks. So does expert parallelism, searched for mixtures
of experts, whose grids are searched only where graphs run the steps (`expert_time`). Settings in `fixed` are not searched. A first
pass assumes that ZeRO divides bytes evenly; returned grids are checked rank by rank with `megatron.lm.planning.memory`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.lm.config import Config
from megatron.lm.config.rules import experts, shape, training
from megatron.lm.config.rules.table import conflicts
from megatron.lm.config.sections.parallel import AXES, CP_COMM_TYPES
from megatron.lm.graphs.capture import captured
from megatron.lm.planning import memory
from megatron.lm.planning.cluster import Cluster
from megatron.lm.planning.memory import GIB, RESERVED, Rank
from megatron.lm.planning.mixtures import expert_time
from megatron.lm.planning.rates import Rates
from megatron.lm.planning.time import Step, predict

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTED: tuple[dict[str, Any], ...] = (
    {"recompute_granularity": None, "recompute_modules": (), "recompute_method": None, "recompute_num_layers": None},
    {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp"),
        "recompute_method": None,
        "recompute_num_layers": None,
    },
    {"recompute_granularity": "full", "recompute_modules": (), "recompute_method": "uniform", "recompute_num_layers": 1},
)
OF_EXPERTS: tuple[dict[str, Any], ...] = (RECOMPUTED[0], RECOMPUTED[1] | {"recompute_modules": ("mlp",)})  # other recomputation is eager
GRID = (
    AXES["tensor"],
    AXES["pipeline"],
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    AXES["context"],
    "cp_comm_type",
    AXES["expert"],
)
WHOLE: dict[str, Any] = {"cp_comm_type": "p2p", "cp_wire": None}  # the flags of context parallelism, which are refused without it
LONG = 8192  # tokens
UNEVEN = 1.05  # allowed ratio of the busiest rank of a partition to the mean


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One grid: its configuration, the memory of each rank, and the step time."""

    config: Config
    ranks: list[Rank]
    step: Step

    @property
    def fullest(self) -> Rank:
        """Return the rank with the most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)


def planned(config: Config, cluster: Cluster, rates: Rates) -> Planned:
    """Return the plan of the configuration's own grid; ValueError as `predict`."""
    ranks = _exact(config, cluster.gpus)
    return Planned(config=config, ranks=ranks, step=predict(config, cluster, rates, ranks))


def best(config: Config, cluster: Cluster, rates: Rates, capacity: float, fixed: Sequence[str] = (), top: int = 5) -> list[Planned]:
    """Return at most `top` grids that fit, the fastest first.

    Args:
        config: the run; its grid, micro-batch size and recomputation are searched unless `fixed` names them, and for pipelines whether
            graphs run the steps.
        capacity: bytes of a GPU, of which `RESERVED` stay free.
        fixed: field names of settings that are not searched.

    Raises:
        ValueError: if no grid divides the model and the GPUs, none of them has measured rates, or none fits; the message has
            alternatives.
    """
    fitting, least, refused, unknown = [], None, "", None
    for one in candidates(config, cluster, fixed):
        problem = next(iter(_problems(one, cluster.gpus)), None)
        if problem is not None:
            refused = refused or problem
            continue
        if (without_rate := expert_time.refusal(one)) is not None:
            unknown = without_rate
            continue
        # Experts that processes share have fewer copies than the rest, and are not divided evenly among all.
        rough = _even(one, cluster.gpus) if one.parallel.expert_model_parallel_size == 1 else _exact(one, cluster.gpus)
        need = max(rank.total for rank in rough)
        least = need if least is None else min(least, need)
        if need / UNEVEN + RESERVED <= capacity:
            fitting.append((predict(one, cluster, rates, rough).total, one))
    if least is None and unknown is not None:
        raise ValueError(unknown)
    if least is None:
        raise ValueError(f"no grid divides this model and {cluster.gpus} GPUs: {refused}")
    fits = []
    for _, one in sorted(fitting, key=lambda pair: pair[0]):
        exact = planned(one, cluster, rates)
        if exact.fullest.total + RESERVED <= capacity:
            fits.append(exact)
        if len(fits) == top:
            break
    if not fits:
        raise ValueError(
            f"no grid of {cluster.gpus} GPUs fits: the smallest needs about {least / GIB:.1f} GiB per process and {RESERVED / GIB:g} for "
            f"CUDA and NCCL, but a GPU has {capacity / GIB:.1f}: use more --gpus, a shorter --seq-length, or --precision O2 or O3, which "
            "take 6 and 7 bytes per parameter"
        )
    return sorted(fits, key=lambda one: one.step.total)


def candidates(config: Config, cluster: Cluster, fixed: Sequence[str] = ()) -> Iterator[Config]:
    """Iterate over all combinations of the searched settings, also those that do not divide the model or the GPUs."""
    model = config.model
    given = config.parallel
    tensor = [given.tensor_model_parallel_size] if GRID[0] in fixed else [n for n in _powers(cluster.per_host) if n <= cluster.gpus]
    stages = [given.pipeline_model_parallel_size] if GRID[1] in fixed else [n for n in _divisors(model.num_layers) if n <= cluster.gpus]
    parts = [given.context_parallel_size]
    if GRID[4] not in fixed and model.seq_length > LONG:
        parts = [n for n in _powers(cluster.per_host) if n <= cluster.gpus]
    batches = [config.training.micro_batch_size] if "micro_batch_size" in fixed else list(MICRO_BATCHES)
    shares = [given.expert_model_parallel_size]
    if GRID[6] not in fixed and model.num_experts is not None:
        shares = [n for n in _powers(cluster.per_host) if n <= cluster.gpus and model.num_experts % n == 0]
    recomputing = RECOMPUTED if model.num_experts is None else OF_EXPERTS
    again = [{}] if any(name.startswith("recompute") for name in fixed) else list(recomputing)
    for tp, cp, ep, pp, micro_batch, recomputed in itertools.product(tensor, parts, shares, stages, batches, again):
        grid = replace(
            given,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            pipeline_model_parallel_size=pp,
            **(WHOLE if cp == 1 else {}),
        )
        if cluster.gpus % grid.unit or (len(parts) > 1 and tp * cp > cluster.per_host):
            continue
        chunks = [given.num_layers_per_virtual_pipeline_stage] if GRID[2] in fixed else _chunks(model.num_layers // pp if pp > 1 else 1)
        for chunk in chunks:
            split = given.sequence_parallel if GRID[3] in fixed else tp > 1
            parallel = replace(grid, num_layers_per_virtual_pipeline_stage=chunk, sequence_parallel=split)
            trained = replace(config.training, micro_batch_size=micro_batch, **recomputed)
            for way in CP_COMM_TYPES if cp > 1 and GRID[5] not in fixed else (grid.cp_comm_type,):
                one = replace(config, parallel=replace(parallel, cp_comm_type=way), training=trained)
                yield one
                # Graphs of pipeline stages have memory for each micro-batch in flight: eager steps may fit where they do not.
                if pp > 1 and "cuda_graph" not in fixed and captured(one):
                    yield replace(one, training=replace(trained, cuda_graph="none"))


def _problems(config: Config, gpus: int) -> Iterator[str]:
    yield from conflicts(config)
    for rules in (shape.RULES, experts.RULES, training.RULES):
        for rule in rules:
            yield from rule(config, gpus)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if most % 2**n == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _chunks(layers: int) -> list[int | None]:
    """Return the layers per chunk to try: no interleaving, two chunks per stage, and one layer per chunk."""
    return [None, *sorted({layers // 2, 1} - {0, layers})] if layers > 1 else [None]


def _even(config: Config, gpus: int) -> list[Rank]:
    """Return a rank of each stage, with sharded states divided evenly by the number of ranks."""
    axes = config.axes(gpus)
    share = axes.copies if config.shards_optimizer else 1
    micro_batches, ranks = config.num_micro_batches(gpus), []
    for rank in _of_states(_bare(config, 2 if micro_batches > 1 else 1), axes.model):
        states = {name: round(size / share) for name, size in rank.states.items()}
        activations = memory.stage_activations(config, rank.stage, micro_batches)
        ranks.append(replace(rank, states=states, gradient=round(rank.gradient / share), activations=activations))
    return ranks


def _exact(config: Config, gpus: int) -> list[Rank]:
    """Return the result of `memory.plan`."""
    axes, micro_batches = config.axes(gpus), config.num_micro_batches(gpus)
    activations = [memory.stage_activations(config, stage, micro_batches) for stage in range(axes.pipeline)]
    ranks = _of_states(_bare(config, axes.copies * (2 if micro_batches > 1 else 1)), gpus)
    return [replace(rank, activations=activations[rank.stage]) for rank in ranks]


def _bare(config: Config, batch: int) -> Config:
    """Return the settings that model states depend on, so that many grids share a cached result: no recomputation, no chunks, whole
    sequences, and one or two micro-batches per step."""
    parallel = replace(config.parallel, num_layers_per_virtual_pipeline_stage=None, context_parallel_size=1, **WHOLE)
    graph = config.training.cuda_graph if captured(config) else "none"  # recomputation may prevent graphs, in which gradients differ
    bare = replace(config.training, micro_batch_size=1, global_batch_size=batch, cuda_graph=graph, **RECOMPUTED[0])
    return replace(config, parallel=parallel, training=bare)


@functools.lru_cache(maxsize=512)
def _of_states(config: Config, gpus: int) -> tuple[Rank, ...]:
    return tuple(memory.plan(config, gpus))
