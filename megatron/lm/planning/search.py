"""Search the grids of a model that fit a cluster, fastest first.

Tensor parallelism stays within a host and uses sequence parallelism. Context parallelism stays within a host too, and is searched for
sequences longer than `LONG`: shorter ones are better divided between data-parallel ranks. So does expert parallelism, searched for mixtures
of experts, whose grids are searched only where graphs run the steps (`expert_time`). Settings in `fixed` are not searched. A first
pass assumes that ZeRO divides bytes evenly; returned grids are checked rank by rank with `megatron.lm.planning.memory`.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.lm.config import Config
from megatron.lm.config.rules import experts, shape, training
from megatron.lm.config.rules.table import conflicts
from megatron.lm.config.sections.parallel import AXES, CP_COMM_TYPES
from megatron.lm.planning import expert_time, memory
from megatron.lm.planning.memory import GIB, RESERVED, Rank, captured
from megatron.lm.planning.rates import Cluster, Rates
from megatron.lm.planning.time import PredictedStep, predict

RULES = (*shape.RULES, *experts.RULES, *training.RULES)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


NOTHING: dict[str, Any] = {"recompute_modules": ()} | dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
SELECTIVE = NOTHING | {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}
FULL = NOTHING | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OF_EXPERTS = (NOTHING, SELECTIVE | {"recompute_modules": ("mlp",)})  # other recomputation is eager
WHOLE: dict[str, Any] = {"cp_comm_type": "p2p", "cp_wire": None}  # the flags of context parallelism, which are refused without it
LONG = 8192  # tokens
UNEVEN = 1.05  # allowed ratio of the busiest rank of a partition to the mean


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One grid: its configuration, the memory of each rank, and the step time."""

    config: Config
    ranks: list[Rank]
    step: PredictedStep

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
        problem = next((problem for rule in RULES for problem in rule(one, cluster.gpus)), None) or next(conflicts(one), None)
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
    model, given, per_host = config.model, config.parallel, cluster.per_host
    near = [2**n for n in range(per_host.bit_length()) if per_host % 2**n == 0]

    def tried(name: str, numbers: Iterable[int], searched: bool = True) -> list[int]:
        own = config.training.micro_batch_size if name == "micro_batch_size" else getattr(given, name)
        return [n for n in numbers if n <= cluster.gpus or name == "micro_batch_size"] if searched and name not in fixed else [own]

    tensor, stages = (
        tried(AXES["tensor"], near),
        tried(AXES["pipeline"], [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0]),
    )
    parts = tried(AXES["context"], near, model.seq_length > LONG)
    experts = model.num_experts
    shares = tried(AXES["expert"], [n for n in near if experts is not None and experts % n == 0], experts is not None)
    batches = tried("micro_batch_size", MICRO_BATCHES)
    again: tuple[dict[str, Any], ...] = (NOTHING, SELECTIVE, FULL) if experts is None else OF_EXPERTS
    again = ({},) if any(name.startswith("recompute") for name in fixed) else again
    for tp, cp, ep, pp, micro_batch, recomputed in itertools.product(tensor, parts, shares, stages, batches, again):
        sizes = {AXES["tensor"]: tp, AXES["context"]: cp, AXES["expert"]: ep, AXES["pipeline"]: pp}
        grid = replace(given, **sizes, **(WHOLE if cp == 1 else {}))  # type: ignore[arg-type]
        if cluster.gpus % grid.unit or (len(parts) > 1 and tp * cp > per_host):
            continue
        chunks = [given.num_layers_per_virtual_pipeline_stage]
        if "num_layers_per_virtual_pipeline_stage" not in fixed:
            layers = model.num_layers // pp if pp > 1 else 1
            chunks = [None, *sorted({layers // 2, 1} - {0, layers})]  # no interleaving, two chunks per stage, one layer per chunk
        split = given.sequence_parallel if "sequence_parallel" in fixed else tp > 1
        ways = CP_COMM_TYPES if cp > 1 and "cp_comm_type" not in fixed else (grid.cp_comm_type,)
        trained = replace(config.training, micro_batch_size=micro_batch, **recomputed)
        for chunk, way in itertools.product(chunks, ways):
            parallel = replace(grid, num_layers_per_virtual_pipeline_stage=chunk, sequence_parallel=split, cp_comm_type=way)
            one = replace(config, parallel=parallel, training=trained)
            yield one
            # Graphs of pipeline stages have memory for each micro-batch in flight: eager steps may fit where they do not.
            if pp > 1 and "cuda_graph" not in fixed and captured(one):
                yield replace(one, training=replace(trained, cuda_graph="none"))


def _even(config: Config, gpus: int) -> list[Rank]:
    """Return a rank of each stage, with sharded states divided evenly by the number of ranks."""
    axes = config.parallel.axes(gpus)
    share = axes.copies if config.shards_optimizer else 1
    micro_batches, ranks = config.num_micro_batches(gpus), []
    for rank in _ranks_with_states(_bare(config, 2 if micro_batches > 1 else 1), axes.model):
        states = {name: round(size / share) for name, size in rank.states.items()}
        activations = memory.stage_activations(config, rank.stage, micro_batches)
        ranks.append(replace(rank, states=states, gradient=round(rank.gradient / share), activations=activations))
    return ranks


def _exact(config: Config, gpus: int) -> list[Rank]:
    """Return the result of `memory.plan`."""
    axes, micro_batches = config.parallel.axes(gpus), config.num_micro_batches(gpus)
    activations = [memory.stage_activations(config, stage, micro_batches) for stage in range(axes.pipeline)]
    ranks = _ranks_with_states(_bare(config, axes.copies * (2 if micro_batches > 1 else 1)), gpus)
    return [replace(rank, activations=activations[rank.stage]) for rank in ranks]


def _bare(config: Config, batch: int) -> Config:
    """Return the settings that model states depend on, so that many grids share a cached result: no recomputation, no chunks, whole
    sequences, and one or two micro-batches per step."""
    parallel = replace(config.parallel, num_layers_per_virtual_pipeline_stage=None, context_parallel_size=1, **WHOLE)
    graph = config.training.cuda_graph if captured(config) else "none"  # recomputation may prevent graphs, in which gradients differ
    bare = replace(config.training, micro_batch_size=1, global_batch_size=batch, cuda_graph=graph, **NOTHING)
    return replace(config, parallel=parallel, training=bare)


@functools.lru_cache(maxsize=512)
def _ranks_with_states(config: Config, gpus: int) -> tuple[Rank, ...]:
    return tuple(memory.plan(config, gpus))
