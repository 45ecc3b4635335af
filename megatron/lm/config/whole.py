"""`Config`: all sections of the settings, and quantities that depend on several of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron.lm.config.sections.batch_sizes import BatchSizes, Ramp
from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.outputs import CheckpointConfig, FaultConfig, LoggingConfig, ProfilingConfig
from megatron.lm.config.sections.parallel import CommunicationConfig, ParallelConfig, ProcessAxes
from megatron.lm.config.sections.precision import LINEARS, PrecisionConfig
from megatron.lm.config.sections.training import DataConfig, OptimizerConfig, TrainingConfig

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class ScheduleSteps:
    """Learning-rate schedule in its own steps: iterations, or samples with `--train-samples`.

    Attributes:
        in_samples: whether a step is a sample.
        warmup: steps of linear warm-up; not an integer in general with `--lr-warmup-fraction`.
        decay: steps after which the learning rate is `min_lr`.
        wsd: the last steps of the decay, in which WSD decays; None if not set.
    """

    in_samples: bool
    warmup: float
    decay: int
    wsd: int | None


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
        optimizer, training = self.optimizer, self.training
        if training.train_samples is not None:
            decay, warmup, wsd = (
                optimizer.lr_decay_samples or training.train_samples,
                optimizer.lr_warmup_samples,
                optimizer.lr_wsd_decay_samples,
            )
        else:
            assert training.train_iters is not None
            decay, warmup, wsd = optimizer.lr_decay_iters or training.train_iters, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
        share = optimizer.lr_warmup_fraction
        return ScheduleSteps(
            in_samples=training.train_samples is not None, warmup=warmup if share is None else share * decay, decay=decay, wsd=wsd
        )

    @property
    def shards_optimizer(self) -> bool:
        """Whether each data-parallel process stores and updates only its own part of the optimizer states (ZeRO)."""
        return self.parallel.use_distributed_optimizer or self.precision.named.shards_optimizer

    @property
    def layers_in_bf16(self) -> frozenset[int]:
        """Transformer layers, from 0, that `--first-last-layers-bf16` keeps entirely in BF16."""
        precision, layers = self.precision, range(self.model.num_layers)
        if not precision.first_last_layers_bf16:
            return frozenset()
        end = self.model.num_layers - precision.num_layers_at_end_in_bf16
        return frozenset(layers[: precision.num_layers_at_start_in_bf16]) | frozenset(layers[max(0, end) :])

    @property
    def fp8_experts(self) -> tuple[int, ...]:
        """Indices of the MoE layers that use FP8. Layers kept in BF16 are not included."""
        return tuple(n for n in self.model.moe_layers if n not in self.layers_in_bf16) if self.precision.named.fp8 else ()

    @property
    def recomputes_fc1_of_experts(self) -> bool:
        """Whether recomputing the MLP in a layer with FP8 experts means recomputing FC1's output (`megatron.lm.model.moe.fp8_experts`)."""
        return "mlp" in self.training.recomputed_modules and self.model.moe_shared_expert_intermediate_size is None

    def of_layer(self, layer: int) -> "Config":
        """Return the configuration of a model in which all layers are as layer `layer`, from 0, of this one."""
        mixtures = self.model.moe_layers
        if 0 < len(mixtures) < self.model.num_layers:
            alike = {"moe_layer_freq": "1"} if layer in mixtures else {"num_experts": None}
            return replace(self, model=replace(self.model, **alike)).of_layer(layer)  # type: ignore[arg-type]
        if layer not in self.layers_in_bf16:
            return replace(self, precision=replace(self.precision, first_last_layers_bf16=False)) if self.layers_in_bf16 else self
        plain = replace(self.precision, first_last_layers_bf16=False, bf16_linears=LINEARS, attention_precision="bf16")
        return replace(self, precision=plain)

    @property
    def fuses_layers(self) -> bool:
        """Whether the transformer layers except `layers_in_bf16` are fused, see `fuses`."""
        return self.fuses(self.precision.recipe)

    def fuses(self, recipe: "Recipe") -> bool:
        """Return whether the linear layers of a transformer layer are two fused FP8 blocks in this recipe: all four in FP8, with casts that
        the block kernels support, and norms of queries and keys, if any, of each head."""
        fp8 = recipe.gemm is not None and recipe.gemm.fusible and not self.precision.bf16_linears
        return fp8 and not self.model.hidden_dropout and self.model.qk_layernorm_scope == "head"

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Round `vocab_size` up to a multiple of make_vocab_size_divisible_by x TP: rows of the embedding."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    def with_attention(self, precision: str) -> "Config":
        """Return the same run with another `--attention-precision`."""
        return replace(self, precision=replace(self.precision, attention_precision=precision))

    def axes(self, world_size: int) -> ProcessAxes:
        """Return the grid of `world_size` processes."""
        return self.parallel.axes(world_size)

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks per pipeline stage; None without interleaving."""
        layers = self.parallel.num_layers_per_virtual_pipeline_stage
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size // layers if layers else None

    @property
    def rows(self) -> int:
        """Tokens of each sequence whose hidden states a process has between two layers, which it also sends to the next stage."""
        tensor = self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1
        return self.model.seq_length // (self.parallel.context_parallel_size * tensor)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch whose activations a process computes, without sequence parallelism."""
        return self.model.seq_length // self.parallel.context_parallel_size * self.training.micro_batch_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return how many of `world_size` processes, or of the groups that share samples, read different samples."""
        return self.axes(world_size).data

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
