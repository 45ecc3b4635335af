"""The text that `--dry-run` prints: grid, batch, parameters, and the memory of the emptiest and the fullest process."""

from dataclasses import replace

from megatron.lm.config import Config
from megatron.lm.config.presets import active_parameter_count, parameter_count
from megatron.lm.planning.layers import vocabulary
from megatron.lm.planning.memory import GIB, document_mask, plan


def report(config: Config, world_size: int) -> str:
    """Return a text with grid, parameters, and GiB of the emptiest and the fullest rank."""
    parallel, training, ranks = config.parallel, config.training, plan(config, world_size)
    virtual = parallel.num_layers_per_virtual_pipeline_stage
    grid = (
        f"grid: {world_size} process{'es' if world_size > 1 else ''} = {config.axes(world_size)}"
        + (", sequence parallel" if parallel.sequence_parallel else "")
        + (f", {virtual} layers per virtual stage" if virtual else "")
        + (", ZeRO" if config.shards_optimizer else "")
    )
    tokens = config.global_batch_size(world_size) * config.model.seq_length
    batch = (
        f"batch: {config.global_batch_size(world_size)} sequences = {tokens:,} tokens, {config.num_micro_batches(world_size)} x "
        f"{training.micro_batch_size} per process; {config.iterations(world_size):,} iterations = "
        f"{config.samples_read(world_size) * config.model.seq_length / 1e9:.1f}B tokens"
    )
    if (ramp := config.batch_sizes(world_size).ramp) is not None:
        batch += f"; ramp: from {ramp.start} sequences by {ramp.increment} over {ramp.samples:,} samples"
    few, many = min(rank.parameters for rank in ranks), max(rank.parameters for rank in ranks)
    whole = parameter_count(config.model, vocabulary(config))
    active = active_parameter_count(config.model, vocabulary(config))
    of_experts = f", {active:,} active per token" if active < whole else ""
    size = (
        f"parameters: {whole:,}{of_experts}; per process {few:,}"
        + (f" to {many:,}" if many > few else "")
        + f"; vocabulary {vocabulary(config):,}"
    )
    columns = ("weight", *ranks[0].states, "gradient", "accumulated", "activations", "total")
    table = [f"{'GiB per process, ' + config.precision.name:<34}" + "".join(f"{name:>12}" for name in columns)]
    for what, rank in (("least", min(ranks, key=lambda rank: rank.total)), ("fullest", max(ranks, key=lambda rank: rank.total))):
        sizes = {**vars(rank), **rank.states, "total": rank.total}
        where = f"{what}: stage {rank.stage}, data-parallel {rank.copy}"
        table.append(f"{where:<34}" + "".join(f"{sizes[name] / GIB:>12.2f}" for name in columns))
    eager = plan(replace(config, training=replace(training, cuda_graph="none")), world_size)
    if (graphs := max(rank.total for rank in ranks) - max(rank.total for rank in eager)) > 0:
        table.append(f"CUDA graphs of pipeline stages take {graphs / GIB:.2f} GiB of the fullest rank: --cuda-graph none does without them")
    if mask := document_mask(config):
        table.append(f"activations include {mask / GIB:.2f} GiB per micro-batch in flight for the mask of --reset-attention-mask")
    return "\n".join([grid, batch, size, *table])
