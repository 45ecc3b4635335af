"""The grid of data, tensor and pipeline parallelism: which gradient travels where in which format, and what all ranks agree on."""

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from megatron.lm.config import Config
from megatron.lm.optim import parameter_groups
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.comm.grad_sync import GradSync
from msamp.numerics.recipe import Recipe
from msamp.parallel.data_parallel import grad_sync


def chunks(model: nn.Module) -> list[GPTModel]:
    """What a rank has of the model: one part of it, or several that take turns (interleaved pipeline stages)."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]  # type: ignore[arg-type, list-item]


def build_grad_sync(model: nn.Module, config: Config, recipe: Recipe, sent: WireBytes | None = None) -> GradSync:
    """The synchroniser of this rank's gradients, told by megatron-core's schedule which micro-batch is the last.

    Besides the average over the data-parallel ranks it takes two sums: of a tied embedding's gradients over the first and the
    last pipeline stage, which have a copy each, and under sequence parallelism of those of norms and row-parallel biases, which
    see a part of the sequence each, over the tensor-parallel ranks.
    """
    communication = config.communication
    sent = WireBytes() if sent is None else sent
    sync = grad_sync(
        model,
        {p: group["formats"].grad for group in parameter_groups(model, recipe) for p in group["params"]},
        parallel_state.get_data_parallel_group(),
        bucket_elements=communication.bucket_size,
        shard=config.shards_optimizer,
        exchange=communication.grad_exchange,
        scaling=communication.gradient_scaling,
        mu_rule=communication.mu_adaptation,
        accumulate=config.precision.grad_accum,
        overlap=communication.overlap_grad_reduce,
        seed=config.training.seed,
        sums=[
            (Peers(_embedding_group(), sent), [p for p in model.parameters() if getattr(p, "shared_embedding", False)]),
            (
                Peers(parallel_state.get_tensor_model_parallel_group(), sent),
                [p for p in model.parameters() if getattr(p, "sequence_parallel", False)],
            ),
        ],
        sent=sent,
    )
    for chunk in chunks(model):
        chunk.config.no_sync_func = sync.no_sync
    return sync


def _embedding_group() -> dist.ProcessGroup | None:
    """The first and the last stage of this rank's pipeline; None on the others."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    return group if group is not None and dist.get_rank() in dist.get_process_group_ranks(group) else None


def count_pipeline_traffic(sent: WireBytes, config: Config, parts: Sequence[GPTModel], micro_batches: int) -> None:
    """Count what this rank sends other pipeline stages in a step: an activation a micro-batch onward, its gradient back."""
    model, parallel = config.model, config.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return
    tokens = model.seq_length * config.training.micro_batch_size
    if parallel.sequence_parallel:
        tokens //= parallel.tensor_model_parallel_size
    transfers = sum((not part.post_process) + (not part.pre_process) for part in parts)
    size = tokens * model.hidden_size * parts[0].config.pipeline_dtype.itemsize
    sent.add("activation", "pipeline send", transfers * micro_batches * size)
