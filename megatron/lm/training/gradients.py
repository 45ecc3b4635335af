"""Build the gradient synchronizer of a run on the grid of ranks, and count the traffic between pipeline stages."""

import math
from collections.abc import Sequence
from itertools import groupby

from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from megatron.lm.config import CommunicationConfig
from megatron.lm.processes.grid import Grid, is_expert
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import Format
from msamp.numerics.recipe import Recipe
from msamp.optim.states import parameter_kind
from msamp.parallel.data_parallel import grad_sync


def chunks(model: nn.Module) -> list[LanguageModule]:
    """Return this rank's chunks of the model: several with interleaved pipeline stages, else one."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]  # type: ignore[arg-type, list-item]


def build_grad_sync(
    model: nn.Module,
    communication: CommunicationConfig,
    recipe: Recipe,
    *,
    shard: bool,
    accumulate: str,
    seed: int,
    sent: WireBytes | None = None,
    grid: Grid | None = None,
) -> GradSync:
    """Build this rank's gradient synchronizer. megatron-core's schedule signals which micro-batch is the last.

    Args:
        model: of this rank.
        communication, recipe: of the run.
        shard: whether each rank gets only the gradients that it owns (ZeRO).
        accumulate: format of the sums over micro-batches (`PrecisionConfig.grad_accum`).
        seed: of stochastic rounding.
        sent: counter of the bytes that this rank sends.
        grid: defines the ranks that average and those that sum; None is the current grid.
    """
    sent = WireBytes() if sent is None else sent
    grid = Grid.current() if grid is None else grid
    formats: dict[Tensor, Format] = {p: recipe.formats_of(parameter_kind(p)).grad for p in model.parameters()}
    experts = [p for p in model.parameters() if is_expert(p)]
    copies = grid.expert_copies
    sync = grad_sync(
        model,
        formats,
        grid.copies.group,
        bucket_elements=communication.bucket_size,
        whole=list(model.parameters()) if recipe.whole_tensors else (),
        shard=shard,
        exchange=communication.grad_exchange,
        scaling=communication.gradient_scaling,
        mu_rule=communication.mu_adaptation,
        accumulate=accumulate,
        overlap=communication.overlap_grad_reduce,
        seed=seed,
        sums=[
            (Peers(ranks.group, sent), list(alike))
            for ranks, params in grid.sums(model.parameters())
            # One sum per format: with sequence parallelism a router's weight is summed as the norms are, in the format of matrices.
            for _, alike in groupby(sorted(params, key=lambda p: formats[p].name), key=lambda p: formats[p])
        ],
        others=OtherRanks(Peers(copies.group, sent), experts, copies.size / grid.copies.size) if experts else None,
        sent=sent,
        heed_zero_grad=False,  # this loop clears gradients only with `clear`
    )
    for chunk in chunks(model):
        chunk.config.no_sync_func = sync.no_sync
    return sync


def count_pipeline_traffic(sent: WireBytes, hidden_shape: Sequence[int], parts: Sequence[LanguageModule], micro_batches: int) -> None:
    """Count the bytes that this rank sends to other pipeline stages in a step: per micro-batch an activation forward, a gradient back."""
    transfers = sum((not part.post_process) + (not part.pre_process) for part in parts)
    if transfers:
        size = math.prod(hidden_shape) * parts[0].config.pipeline_dtype.itemsize
        sent.add("activation", "pipeline send", transfers * micro_batches * size)
