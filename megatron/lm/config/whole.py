"""`Config`: all sections of the settings, and quantities that depend on several of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megatron.lm.config.sections.batch_sizes import BatchSizes, Ramp
from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.outputs import CheckpointConfig, FaultConfig, LoggingConfig, ProfilingConfig
from megatron.lm.config.sections.parallel import CommunicationConfig, ParallelConfig
from megatron.lm.config.sections.precision import LINEARS, PrecisionConfig
from megatron.lm.config.sections.training import DataConfig, OptimizerConfig, ScheduleSteps, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `world_size` below is the number of processes; sizes are valid once `check.check` has passed."""

    model: ModelConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def schedule_steps(self) -> ScheduleSteps:
        """Length of warm-up and decay."""
        return self.optimizer.schedule_steps(self.training)

    @property
    def shards_optimizer(self) -> bool:
        """Whether each data-parallel process stores and updates only its own part of the optimizer states (ZeRO)."""
        return self.parallel.use_distributed_optimizer or self.precision.named.shards_optimizer

    def of_layer(self, layer: int) -> "Config":
        """Return the configuration of a model in which all layers are as layer `layer`, from 0, of this one."""
        mixtures = self.model.moe_layers
        if 0 < len(mixtures) < self.model.num_layers:
            alike = {"moe_layer_freq": "1"} if layer in mixtures else {"num_experts": None}
            return replace(self, model=replace(self.model, **alike)).of_layer(layer)  # type: ignore[arg-type]
        wide = self.precision.layers_in_bf16(self.model.num_layers)
        if layer not in wide:
            return replace(self, precision=replace(self.precision, first_last_layers_bf16=False)) if wide else self
        plain = replace(self.precision, first_last_layers_bf16=False, bf16_linears=LINEARS, attention_precision="bf16")
        return replace(self, precision=plain)

    @property
    def fuses_layers(self) -> bool:
        """Whether the transformer layers except those kept in BF16 are fused, see `PrecisionConfig.fuses`."""
        return self.precision.fuses(self.model, self.precision.recipe)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the embedding, see `ModelConfig.padded_vocab_size`."""
        return self.model.padded_vocab_size(vocab_size, self.parallel.tensor_model_parallel_size)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch whose activations a process computes, without sequence parallelism."""
        return self.model.seq_length // self.parallel.context_parallel_size * self.training.micro_batch_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return how many of `world_size` processes, or of the groups that share samples, read different samples."""
        return self.parallel.axes(world_size).data

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Return the number of sequences of each iteration."""
        words = self.training.rampup_batch_size
        ramp = Ramp(*words) if len(words) == 3 else None
        return BatchSizes(self.training.global_batch_size or self.training.micro_batch_size * self.data_parallel_size(world_size), ramp)

    def global_batch_size(self, world_size: int, consumed_samples: int | None = None) -> int:
        """Return the number of sequences in the iteration after `consumed_samples`, or after a ramp of the batch size."""
        sizes = self.batch_sizes(world_size)
        return sizes.final if consumed_samples is None else sizes.at(consumed_samples)

    def num_micro_batches(self, world_size: int, consumed_samples: int | None = None) -> int:
        """Return the number of micro-batches per process and iteration; `consumed_samples` as in `global_batch_size`."""
        row = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size, consumed_samples) // row

    def iterations(self, world_size: int) -> int:
        """Return the iterations of the whole run: `--train-iters`, or the number that reads `--train-samples`."""
        training = self.training
        if training.train_samples is not None:
            return self.batch_sizes(world_size).iterations(training.train_samples)
        assert training.train_iters is not None
        return training.train_iters

    def samples_read(self, world_size: int) -> int:
        """Return the number of sequences that the whole run reads."""
        return self.batch_sizes(world_size).consumed(self.iterations(world_size))


Problems = Iterator[str]  # messages of a rule
Rules = dict[Callable[[Config, int], Problems], tuple[str, ...]]  # rule -> the sections that it reads
