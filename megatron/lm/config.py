"""Settings of a training run: ten frozen dataclasses and `Config`, which holds one of each.

A field is a flag: its name with dashes is the spelling (Megatron-LM's wherever Megatron-LM has the flag), its metadata carries the help
text, the choices and the legal interval. `cli.py` generates the flags from here and `checks.py` judges the values; nothing here looks
at the machine. `None` always means "derived": the property of the same dataclass says from what.
"""

import math
import os
from dataclasses import MISSING, dataclass, field
from typing import Any

COLLAGE = ("bf16-a", "bf16-kahan", "bf16-dmw", "bf16-d", "collage-light", "collage-plus", "collage-fp8")
PRECISIONS = ("fp32", "fp16-amp", "bf16", *COLLAGE, "coat", "O1", "O2", "O3")
OPT_LEVELS = ("O0", "O1", "O2", "O3")
STATE_FORMATS = ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2")
FP8_FORMATS = ("fp8-e4m3", "fp8-e5m2")
COAT_FORMATS = ("coat-e4m3", "coat-e5m2")
GRAD_ACCUM_DTYPES = ("fp8", "fp8-sr", "bf16", "fp32")
GRAD_EXCHANGES = ("fp32-sum", "nccl")
GRAD_SCALINGS = ("auto", "pre", "post")
MU_RULES = ("halve", "paper")
ACTIVATIONS_SAVED = ("compute", "coat")
TP_WIRES = ("bf16", "fp8")
TP_SAVED_INPUTS = ("shard", "gathered")
TOKENIZERS = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
RECOMPUTE_MODULES = ("core_attn", "mlp")
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SPIKE_ACTIONS = ("warn", "rollback")
DEFAULT_SPLIT = "969,30,1"


@dataclass(frozen=True)
class Interval:
    """Legal values of a numeric setting; NaN and infinities are never among them."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.low_open else self.low <= value
        below = value < self.high if self.high_open or math.isinf(self.high) else value <= self.high
        return above and below

    def __str__(self) -> str:
        opening, closing = "(" if self.low_open else "[", ")" if self.high_open or math.isinf(self.high) else "]"
        return f"{opening}{self.low:.10g}, {self.high:.10g}{closing}"


COUNT = Interval(1)
COUNT_OR_ZERO = Interval(0)
POSITIVE = Interval(0, low_open=True)
NON_NEGATIVE = Interval(0)
PROBABILITY = Interval(0, 1, high_open=True)


def flag(name: str) -> str:
    """Field name -> flag: `num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def setting(help: str, default: Any = MISSING, choices: tuple[str, ...] | None = None, legal: Interval | None = None) -> Any:
    """A dataclass field with its help text, its choices or its legal interval; required where `default` is left out."""
    return field(default=default, metadata={"help": help, "choices": choices, "legal": legal})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the GPT."""

    num_layers: int = setting("transformer layers", legal=COUNT)
    hidden_size: int = setting("width of the residual stream", legal=COUNT)
    num_attention_heads: int = setting("query heads of an attention layer", legal=COUNT)
    seq_length: int = setting("tokens in a training sequence", legal=COUNT)
    ffn_hidden_size: int | None = setting("width of the MLP; derived: 4 x hidden, with --swiglu 8/3 x hidden", None, legal=COUNT)
    group_query_attention: bool = setting("share key and value heads between query heads (GQA)", False)
    num_query_groups: int | None = setting("key and value heads with --group-query-attention; derived: 1", None, legal=COUNT)
    kv_channels: int | None = setting("width of one head; derived: hidden size / heads", None, legal=COUNT)
    max_position_embeddings: int | None = setting("longest sequence the positions reach; derived: seq length", None, legal=COUNT)
    vocab_size: int | None = setting("vocabulary of NullTokenizer (the other tokenizers bring their own)", None, legal=COUNT)
    make_vocab_size_divisible_by: int = setting("pad the vocabulary to a multiple of this x tensor-parallel size", 128, legal=COUNT)
    normalization: str = setting("norm layers", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting("epsilon of the norm layers", 1e-5, legal=POSITIVE)
    swiglu: bool = setting("SwiGLU in the MLP instead of GELU", False)
    disable_bias_linear: bool = setting("linear layers without bias", False)
    position_embedding_type: str = setting("how positions enter the model", "rope", choices=("rope", "learned_absolute"))
    rotary_base: float = setting("base of the rotary embedding's wavelengths", 10000.0, legal=POSITIVE)
    rotary_percent: float = setting("share of a head's width that is rotated", 1.0, legal=Interval(0, 1, low_open=True))
    untie_embeddings_and_output_weights: bool = setting("give the LM head a weight of its own", False)
    init_method_std: float = setting("standard deviation of the initial weights", 0.02, legal=POSITIVE)
    hidden_dropout: float = setting("dropout on the residual stream", 0.0, legal=PROBABILITY)
    attention_dropout: float = setting("dropout on the attention weights", 0.0, legal=PROBABILITY)
    attention_backend: str = setting(
        "kernel of the attention core; auto takes cuDNN, then flash on a GPU", "auto", choices=("auto", "cudnn", "flash", "math")
    )

    @property
    def ffn_size(self) -> int:
        """Width of the MLP; SwiGLU's three matrices at 8/3 h (down to a multiple of 64, as in Megatron-LM) weigh as much as two at 4h."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def query_groups(self) -> int:
        """Key and value heads of an attention layer."""
        return (self.num_query_groups or 1) if self.group_query_attention else self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def max_positions(self) -> int:
        """Longest sequence the position embedding reaches, in tokens."""
        return self.max_position_embeddings or self.seq_length


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is spread over processes."""

    tensor_model_parallel_size: int = setting("processes that share each layer (TP)", 1, legal=COUNT)
    pipeline_model_parallel_size: int = setting("processes that share the stack of layers (PP)", 1, legal=COUNT)
    num_layers_per_virtual_pipeline_stage: int | None = setting("layers of one virtual stage (interleaved PP)", None, legal=COUNT)
    sequence_parallel: bool = setting("split norms and dropout along the sequence between the TP processes", False)
    tp_wire: str = setting(
        "how the sum of a row-parallel layer's output travels at O3 with tensor parallelism: in BF16, or as FP8 that each process adds "
        "up in FP32",
        "bf16",
        choices=TP_WIRES,
    )
    tp_saved_input: str = setting(
        "what a column-parallel layer keeps of its gathered FP8 input for backward at O3 with --sequence-parallel: its own shard, "
        "gathered again in backward, or all of it",
        "shard",
        choices=TP_SAVED_INPUTS,
    )
    use_distributed_optimizer: bool = setting("shard the optimizer's states over the data-parallel processes (ZeRO; O3 always does)", False)
    distributed_backend: str = setting("collectives; auto: nccl with CUDA, else gloo", "auto", choices=("auto", "nccl", "gloo"))
    distributed_timeout_minutes: float = setting(
        "minutes without progress after which a process names who is stuck and ends", 10.0, legal=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The recipe by name, and the formats in which it may be varied (FP8-LM, table 6)."""

    precision: str | None = setting(
        "recipe: bf16 has FP32 masters, bf16-* and collage-* are Collage's options with BF16 gradients (collage-fp8: pairs of BF16 and "
        "E4M3), coat has FP8 GEMMs, moments and saved activations, O1 to O3 are FP8-LM's levels; without it and without --opt-level: bf16",
        None,
        choices=PRECISIONS,
    )
    opt_level: str | None = setting("how far FP8 reaches (O0 is bf16)", None, choices=OPT_LEVELS)
    bf16: bool = setting("the same as --precision bf16", False)
    fp16: bool = setting("the same as --precision fp16-amp: FP16 with FP32 masters and a loss scale", False)
    loss_scale: float | None = setting("a constant loss scale for fp16-amp; derived: a dynamic one", None, legal=POSITIVE)
    initial_loss_scale: float = setting(
        "where the dynamic loss scale of fp16-amp starts; Megatron-LM: 2^32",
        2.0**16,
        legal=Interval(0, 2.0**32, low_open=True),
    )
    min_loss_scale: float = setting("the run stops where the dynamic loss scale falls below this", 1.0, legal=POSITIVE)
    loss_scale_window: int = setting(
        "steps without overflow after which the dynamic loss scale doubles; Megatron-LM: 1000", 2000, legal=COUNT
    )
    hysteresis: int = setting(
        "which overflow since it last doubled is the first to halve the dynamic loss scale; those before only skip their step",
        2,
        legal=COUNT,
    )
    fp8_scaling: str | None = setting(
        "scale of GEMM operands: from the amax of past steps, or just in time; derived: delayed at O1 to O3, current with coat",
        None,
        choices=("delayed", "current"),
    )
    fp8_min_gain: float = setting(
        "at O1 to O3 and with coat a linear layer stays BF16 whose measured gain (time in BF16 over time in FP8, on this GPU) is less; 0: "
        "all are FP8, nothing is measured. No effect at other precisions, so that one line of flags serves all",
        1.0,
        legal=NON_NEGATIVE,
    )
    fp8_gain_cache: str | None = setting("JSON file of the gains measured so far; derived: in the user's cache folder", None)
    bf16_linears: tuple[str, ...] | None = setting(
        "which linear layers of a transformer layer stay BF16 at O1 to O3 and with coat; derived: the choice of the checkpoint that is "
        "resumed, else by --fp8-min-gain",
        None,
        choices=LINEARS,
    )
    master_format: str | None = setting("master weight where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS)
    grad_format: str | None = setting("weight gradient where linear layers are FP8; derived: the recipe's own", None, choices=STATE_FORMATS)
    optimizer_state: str | None = setting(
        "both moments of matrices, wherever the update is FP32 arithmetic: coat is coat-e4m3 (COAT's FP8, a maximum and an exponent for "
        "each 128 of a row); derived: the level's own",
        None,
        choices=("coat",),
    )
    exp_avg_format: str | None = setting(
        "first moment where linear layers are FP8, COAT's wherever the update is FP32 arithmetic; derived: by --optimizer-state, else the "
        "level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    exp_avg_sq_format: str | None = setting(
        "second moment where linear layers are FP8, COAT's wherever the update is FP32 arithmetic; derived: by --optimizer-state, else the "
        "level's own",
        None,
        choices=(*STATE_FORMATS, *COAT_FORMATS),
    )
    save_activations: str | None = setting(
        "how the inputs of norms, GELU and SwiGLU are kept for backward: in the compute dtype, or in E4M3 with a scale for every 16 "
        "channels (COAT); derived: compute, with --precision coat coat",
        None,
        choices=ACTIVATIONS_SAVED,
    )
    grad_accum_dtype: str | None = setting(
        "in what the micro-batches of a step add up (sr: stochastic rounding); derived: bf16 where the weight gradients are FP8, with "
        "Collage's options and with coat's own gradients, else fp32",
        None,
        choices=GRAD_ACCUM_DTYPES,
    )

    @property
    def requests(self) -> dict[str, str]:
        """The flags that ask for a recipe, as written -> the recipe each one names."""
        asked = {}
        if self.precision is not None:
            asked[f"--precision {self.precision}"] = self.precision
        if self.opt_level is not None:
            asked[f"--opt-level {self.opt_level}"] = "bf16" if self.opt_level == "O0" else self.opt_level
        if self.bf16:
            asked["--bf16"] = "bf16"
        if self.fp16:
            asked["--fp16"] = "fp16-amp"
        return asked

    @property
    def name(self) -> str:
        """The recipe: one of `PRECISIONS`. ValueError where two flags ask for different ones."""
        names = sorted(set(self.requests.values())) or ["bf16"]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(self.requests)} contradict each other: keep one of them")
        return names[0]

    @property
    def is_fp8(self) -> bool:
        """Whether the linear layers compute in FP8."""
        return self.name in ("coat", "O1", "O2", "O3")

    @property
    def kept_activations(self) -> str:
        """How the inputs of norms and activations are kept for backward: one of `ACTIVATIONS_SAVED`."""
        return self.save_activations or ("coat" if self.name == "coat" else "compute")

    @property
    def has_fp8_gradients(self) -> bool:
        """Whether the weight gradients of the linear layers are FP8."""
        own = "bf16" if self.name == "coat" else "fp8-e4m3"
        return self.is_fp8 and (self.grad_format or own) in FP8_FORMATS

    @property
    def has_bf16_gradients(self) -> bool:
        """Whether the gradients of all matrices are BF16."""
        return self.name in COLLAGE or (self.name == "coat" and self.grad_format in (None, "bf16"))

    @property
    def grad_accum(self) -> str:
        """In what the weight gradients of several micro-batches add up: one of `GRAD_ACCUM_DTYPES`."""
        return self.grad_accum_dtype or ("bf16" if self.has_fp8_gradients or self.has_bf16_gradients else "fp32")


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """What data-parallel processes send each other, and when (FP8-LM, section 2.1 and figure 7)."""

    grad_exchange: str = setting(
        "how FP8 gradients are summed over the ranks: in FP32 by their owner, or in FP8 by NCCL as in the paper",
        "fp32-sum",
        choices=GRAD_EXCHANGES,
    )
    grad_scaling: str | None = setting(
        "guard against overflow of --grad-exchange nccl: a factor mu that adapts itself, or division by the number of ranks "
        "before or after the sum; derived: auto",
        None,
        choices=GRAD_SCALINGS,
    )
    mu_rule: str | None = setting(
        "how mu of --grad-scaling auto falls when gradients saturate: by half, or at once to 1/2 as in the paper; derived: halve",
        None,
        choices=MU_RULES,
    )
    overlap_grad_reduce: bool = setting("send gradients bucket by bucket during backward; on by default, unlike in Megatron-LM", True)
    overlap_param_gather: bool = setting(
        "gather weights under ZeRO bucket by bucket while the next forward runs; on by default, unlike in Megatron-LM", True
    )
    ddp_bucket_size: int | None = setting("elements in a bucket of gradients or weights; derived: 2^27", None, legal=COUNT)

    @property
    def gradient_scaling(self) -> str | None:
        """One of `GRAD_SCALINGS`; None for the exchange fp32-sum, which cannot overflow."""
        return self.grad_scaling or ("auto" if self.grad_exchange == "nccl" else None)

    @property
    def mu_adaptation(self) -> str | None:
        """One of `MU_RULES`; None where no mu adapts itself."""
        return self.mu_rule or ("halve" if self.gradient_scaling == "auto" else None)

    @property
    def bucket_size(self) -> int:
        """Elements that travel together; a larger tensor is a bucket of its own."""
        return self.ddp_bucket_size or 2**27


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule (iterations are optimizer steps)."""

    lr: float = setting("highest learning rate", legal=POSITIVE)
    min_lr: float = setting("learning rate at the end of the decay", 0.0, legal=NON_NEGATIVE)
    lr_warmup_iters: int = setting("iterations of linear warm-up", 0, legal=COUNT_OR_ZERO)
    lr_decay_iters: int | None = setting("iteration at which the decay ends; derived: --train-iters", None, legal=COUNT)
    lr_decay_style: str = setting("shape of the decay", "linear", choices=("constant", "linear", "cosine", "inverse-square-root"))
    weight_decay: float = setting("decoupled weight decay", 0.01, legal=NON_NEGATIVE)
    adam_beta1: float = setting("decay rate of the first moment", 0.9, legal=PROBABILITY)
    adam_beta2: float = setting("decay rate of the second moment", 0.999, legal=PROBABILITY)
    adam_eps: float = setting("added to the root of the second moment", 1e-8, legal=POSITIVE)
    clip_grad: float = setting("largest norm of the gradient; 0: no clipping", 1.0, legal=NON_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch sizes (in sequences), length of the run, evaluation, recomputation."""

    micro_batch_size: int = setting("sequences in one forward and backward of one process", legal=COUNT)
    global_batch_size: int | None = setting("sequences in an iteration; derived: micro-batch x data-parallel size", None, legal=COUNT)
    train_iters: int = setting("iterations of the whole run, those before a resume included", legal=COUNT)
    seed: int = setting("seed of the weights, the dropout and the order of the data", 1234, legal=Interval(0, 2**31 - 1))
    deterministic: bool = setting(
        "the same bits in every run on the same machines: slower kernels where torch's fast ones add up in any order, and nothing measured",
        False,
    )
    eval_interval: int = setting("iterations between evaluations", 1000, legal=COUNT)
    eval_iters: int = setting("global batches of an evaluation; 0: no evaluation", 100, legal=COUNT_OR_ZERO)
    exit_interval: int | None = setting("leave (after saving) when the iteration is a multiple of this", None, legal=COUNT)
    exit_duration_in_mins: float | None = setting("leave (after saving) so many minutes after the start", None, legal=POSITIVE)
    cuda_graph: str | None = setting(
        "replay forward and backward of a micro-batch as a CUDA graph, or with step the update too; derived: step where possible",
        None,
        choices=("none", "micro-batch", "step"),
    )
    recompute_granularity: str | None = setting(
        "recompute activations in backward: whole layers, or the modules of --recompute-modules", None, choices=("full", "selective")
    )
    recompute_modules: tuple[str, ...] = setting(
        "what --recompute-granularity selective recomputes: the attention core, the MLP (in FP8 without tensor parallelism its "
        "first linear layer: the rest costs no memory there); derived: core_attn",
        (),
        choices=RECOMPUTE_MODULES,
    )
    recompute_method: str | None = setting("recompute every layer, or the first few of a stage", None, choices=("uniform", "block"))
    recompute_num_layers: int | None = setting("layers of one recomputed unit (uniform), or their number (block)", None, legal=COUNT)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets (prefixes of indexed datasets: PREFIX.bin and PREFIX.idx) and tokenizer."""

    data_path: tuple[str, ...] = setting("one prefix, several, or weight prefix pairs; cut by --split", ())
    train_data_path: tuple[str, ...] = setting("training data by itself, written as --data-path", ())
    valid_data_path: tuple[str, ...] = setting("validation data beside --train-data-path", ())
    test_data_path: tuple[str, ...] = setting("test data beside --train-data-path", ())
    split: str = setting("shares of --data-path for training, validation and test", DEFAULT_SPLIT)
    data_cache_path: str | None = setting("folder for the index caches; derived: beside the data", None)
    tokenizer_type: str | None = setting("tokenizer the data was made with", None, choices=TOKENIZERS)
    tokenizer_model: str | None = setting("tokenizer.json of HuggingFaceTokenizer, or a folder that holds one", None)
    vocab_file: str | None = setting("encoder.json of GPT2BPETokenizer", None)
    merge_file: str | None = setting("vocab.bpe of GPT2BPETokenizer", None)
    num_workers: int = setting("processes that read data, beside each training process", 0, legal=COUNT_OR_ZERO)
    eod_mask_loss: bool = setting("leave end-of-document tokens out of the loss", False)
    reset_position_ids: bool = setting("count positions from the last end-of-document token (learned_absolute only)", False)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run tells about itself."""

    log_interval: int = setting("iterations between log lines", 100, legal=COUNT)
    tensorboard_dir: str | None = setting("folder for TensorBoard's event files", None)
    metrics_file: str | None = setting("file to which every measurement is appended, one JSON object a line", None)
    peak_tflops: float | None = setting("peak of one device in TFLOP/s, for MFU; derived: 989 (BF16) on H100, H200", None, legal=POSITIVE)
    dry_run: bool = setting("print the grid, and parameters and bytes of a process, without training; refuse what does not fit", False)
    device_memory_gib: float | None = setting(
        "memory of one device, for --dry-run; derived: that of the GPU here, without one 80", None, legal=POSITIVE
    )
    record_precision: str | None = setting(
        "file to which the precision recorder appends what every tensor of a recorded step lost, one JSON object a step", None
    )
    record_interval: int = setting("iterations between the steps that --record-precision records", 500, legal=COUNT)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting("folder to save checkpoints in", None)
    load: str | None = setting("folder with the checkpoint to start from", None)
    save_interval: int | None = setting("iterations between checkpoints; derived: only one, at the end", None, legal=COUNT)
    async_save: bool = setting("write checkpoints in the background, from a copy in the host's memory, while training goes on", False)
    keep_last: int | None = setting("checkpoints to keep in --save, the newest; derived: all", None, legal=COUNT)
    ckpt_step: int | None = setting("iteration of the checkpoint to load; derived: the newest whole one", None, legal=COUNT_OR_ZERO)
    finetune: bool = setting("load only the weights and start at iteration 0", False)
    no_load_optim: bool = setting("do not load the optimizer's state", False)
    no_load_rng: bool = setting("do not load the state of the random generators", False)

    @property
    def resumes_itself(self) -> bool:
        """Whether the run goes on from its own checkpoints: `--load` is the folder of `--save`, which is empty at its first start."""
        if self.load is None or self.save is None or self.finetune:
            return False
        return os.path.normpath(self.load) == os.path.normpath(self.save)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Steps that go wrong."""

    max_skipped_steps: int = setting("stop when so many steps in a row had a loss or gradient that was not finite", 20, legal=COUNT)
    loss_spike_threshold: float = setting(
        "a loss of more than this many times the mean of the last ones is a spike; 0: no loss is", 0.0, legal=NON_NEGATIVE
    )
    loss_spike_window: int = setting(
        "steps whose mean --loss-spike-threshold is about; no spike is seen before there are so many", 100, legal=COUNT
    )
    loss_spike_action: str = setting(
        "at a spike: say so, or also go back to the newest checkpoint in --save and pass over the data since", "warn", choices=SPIKE_ACTIONS
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `world_size` below is the number of processes; sizes are valid once `checks.check` has passed."""

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
        return self.parallel.use_distributed_optimizer or self.precision.name == "O3"

    @property
    def fuses_layers(self) -> bool:
        """Whether a transformer layer's linear layers are computed as two fused FP8 blocks: all four in FP8, or none."""
        fp8 = self.precision.is_fp8 and not self.precision.bf16_linears
        return fp8 and self.parallel.tensor_model_parallel_size == 1 and not self.model.hidden_dropout

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
