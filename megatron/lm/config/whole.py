"""`Config`: one of each section, and what follows from several of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.lm.config.model import ModelConfig
from megatron.lm.config.outputs import CheckpointConfig, FaultConfig, LoggingConfig
from megatron.lm.config.parallel import CommunicationConfig, ParallelConfig
from megatron.lm.config.precision import PrecisionConfig
from megatron.lm.config.training import DataConfig, OptimizerConfig, TrainingConfig

if TYPE_CHECKING:
    from msamp.numerics.recipe import Recipe


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches `min_lr`."""
        return self.optimizer.lr_decay_iters or self.training.train_iters

    @property
    def shards_optimizer(self) -> bool:
        """Whether each data-parallel process keeps and updates only its own part of the optimizer's states (ZeRO)."""
        return self.parallel.use_distributed_optimizer or self.precision.named.shards_optimizer

    @property
    def fuses_layers(self) -> bool:
        """Whether the transformer layers are fused, see `fuses`."""
        return self.fuses(self.precision.recipe)

    def fuses(self, recipe: "Recipe") -> bool:
        """Whether the linear layers of a transformer layer in this recipe are two fused FP8 blocks: all four in FP8, cast as the blocks'
        kernels can, with tensor parallelism sent in FP8, and nothing between QKV and the rotary embedding."""
        fp8 = recipe.gemm is not None and recipe.gemm.fusible and not self.precision.bf16_linears
        travels = self.parallel.tensor_model_parallel_size == 1 or recipe.fp8_wire
        return fp8 and travels and not self.model.hidden_dropout and not self.model.qk_layernorm

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` up to the next multiple of make_vocab_size_divisible_by x TP: rows of the embedding."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` processes."""
        return world_size // (self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size)

    def global_batch_size(self, world_size: int) -> int:
        """Sequences in one iteration."""
        return self.training.global_batch_size or self.training.micro_batch_size * self.data_parallel_size(world_size)

    def num_micro_batches(self, world_size: int) -> int:
        """Micro-batches each process computes in one iteration."""
        return self.global_batch_size(world_size) // (self.training.micro_batch_size * self.data_parallel_size(world_size))


Problems = Iterator[str]  # messages of a rule
Rules = dict[Callable[[Config, int], Problems], tuple[str, ...]]  # rule -> the sections that it reads
