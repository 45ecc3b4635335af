"""Settings of the optimizer and its schedule, of batches and length of the run, and of data."""

from dataclasses import dataclass

from megatron.lm.config.sections.schema import COUNT, COUNT_OR_ZERO, DECAY_RATE, NON_NEGATIVE, POSITIVE, PROBABILITY, Range, setting

TOKENIZERS = (
    *("GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    *("Llama3Tokenizer", "TikTokenizer", "NullTokenizer"),
)
DEFAULT_SPLIT = "969,30,1"


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
class OptimizerConfig:
    """AdamW and its learning-rate schedule, in iterations (optimizer steps), or in samples with --train-samples."""

    lr: float = setting("peak learning rate", legal=POSITIVE)
    min_lr: float = setting("learning rate at the end of the decay", 0.0, legal=NON_NEGATIVE)
    lr_warmup_iters: int = setting("iterations of linear warm-up", 0, legal=COUNT_OR_ZERO)
    lr_warmup_samples: int = setting("samples of linear warm-up, with --train-samples", 0, legal=COUNT_OR_ZERO)
    lr_warmup_fraction: float | None = setting("share of the decay that is linear warm-up", None, legal=PROBABILITY)
    lr_warmup_init: float = setting("learning rate at which the warm-up starts", 0.0, legal=NON_NEGATIVE)
    lr_decay_iters: int | None = setting("iteration at which the decay ends; derived: --train-iters", None, legal=COUNT)
    lr_decay_samples: int | None = setting("samples after which the decay ends; derived: --train-samples", None, legal=COUNT)
    lr_decay_style: str = setting(
        "shape of the decay; WSD keeps the learning rate after the warm-up and decays it in the last iterations or samples",
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = setting(
        "shape of the last part of --lr-decay-style WSD", "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = setting("last iterations of the decay, in which WSD decays", None, legal=COUNT)
    lr_wsd_decay_samples: int | None = setting("last samples of the decay, in which WSD decays", None, legal=COUNT)
    decoupled_lr: float | None = setting("peak learning rate of the word embedding and the LM head; derived: --lr", None, legal=POSITIVE)
    decoupled_min_lr: float | None = setting(
        "--min-lr of the word embedding and the LM head, with --decoupled-lr; derived: --min-lr", None, legal=NON_NEGATIVE
    )
    weight_decay: float = setting("decoupled weight decay", 0.01, legal=NON_NEGATIVE)
    adam_beta1: float = setting("decay rate of the first moment", 0.9, legal=DECAY_RATE)
    adam_beta2: float = setting("decay rate of the second moment", 0.999, legal=DECAY_RATE)
    adam_eps: float = setting("added to the root of the second moment", 1e-8, legal=POSITIVE)
    sgd_momentum: float = setting("momentum of --optimizer sgd", 0.9, legal=DECAY_RATE)
    muon_momentum: float = setting("momentum of --optimizer muon", 0.95, legal=DECAY_RATE)
    clip_grad: float = setting("largest norm of the gradient; 0: no clipping", 1.0, legal=NON_NEGATIVE)

    def schedule_steps(self, training: "TrainingConfig") -> ScheduleSteps:
        """Return the length of warm-up and decay in a run of this length."""
        if training.train_samples is not None:
            decay, warmup, wsd = self.lr_decay_samples or training.train_samples, self.lr_warmup_samples, self.lr_wsd_decay_samples
        else:
            assert training.train_iters is not None
            decay, warmup, wsd = self.lr_decay_iters or training.train_iters, self.lr_warmup_iters, self.lr_wsd_decay_iters
        share = self.lr_warmup_fraction
        return ScheduleSteps(
            in_samples=training.train_samples is not None, warmup=warmup if share is None else share * decay, decay=decay, wsd=wsd
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch sizes (in sequences), length of the run, evaluation, recomputation."""

    micro_batch_size: int = setting("sequences in one forward and backward of one process", legal=COUNT)
    global_batch_size: int | None = setting("sequences in an iteration; derived: micro-batch x data-parallel size", None, legal=COUNT)
    rampup_batch_size: tuple[int, ...] = setting(
        "START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size by INCREMENT, over the first SAMPLES samples",
        (),
        legal=COUNT,
    )
    train_iters: int | None = setting(
        "iterations of the whole run, including those before a resume; or give --train-samples", None, legal=COUNT
    )
    train_samples: int | None = setting("sequences of the whole run, instead of --train-iters", None, legal=COUNT)
    seed: int = setting("seed of the weights, the dropout and the order of the data", 1234, legal=Range(0, 2**31 - 1))
    deterministic: bool = setting(
        "the same bits in every run on the same machines: slower kernels, which accumulate in a fixed order, and no measured gains",
        False,
    )
    eval_interval: int = setting("iterations between evaluations", 1000, legal=COUNT)
    eval_iters: int = setting("global batches of an evaluation; 0: no evaluation", 100, legal=COUNT_OR_ZERO)
    exit_interval: int | None = setting("save and end at an iteration that is a multiple of this", None, legal=COUNT)
    exit_duration_in_mins: float | None = setting("minutes after the start at which the run saves and ends", None, legal=POSITIVE)
    exit_code_unfinished: int = setting(
        "exit code of a run that stops before --train-iters because of SIGTERM, --exit-interval or --exit-duration-in-mins; with 75 a "
        "batch system can distinguish it from a finished run, which exits with 0",
        0,
        legal=Range(0, 125),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        "iterations between checks that all data-parallel copies of the weights are finite and equal bit by bit; they are always compared "
        "before a save",
        None,
        legal=COUNT,
    )
    cuda_graph: str | None = setting(
        "replay forward and backward of a micro-batch as a CUDA graph, on each pipeline stage; step: the update too; derived: step where "
        "possible",
        None,
        choices=("none", "micro-batch", "step"),
    )
    recompute_granularity: str | None = setting(
        "recompute activations in backward: whole layers, or the modules of --recompute-modules", None, choices=("full", "selective")
    )
    recompute_modules: tuple[str, ...] = setting(
        "modules that --recompute-granularity selective recomputes: the attention core, or the MLP; fused FP8 layers and FP8 "
        "experts recompute only the MLP's first linear layer, since the rest uses no memory; derived: core_attn",
        (),
        choices=("core_attn", "mlp"),
    )
    recompute_method: str | None = setting("recompute every layer, or the first few of a stage", None, choices=("uniform", "block"))
    recompute_num_layers: int | None = setting(
        "with uniform: layers of one recomputed unit; with block: recomputed layers of a stage", None, legal=COUNT
    )

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules that selective recomputation recomputes; empty without it."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute_granularity == "selective" else ()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets (prefixes of indexed datasets: PREFIX.bin and PREFIX.idx) and tokenizer."""

    data_path: tuple[str, ...] = setting("one prefix, several, or a weight before each prefix; divided by --split", ())
    train_data_path: tuple[str, ...] = setting("training data only, in the form of --data-path", ())
    valid_data_path: tuple[str, ...] = setting("validation data with --train-data-path", ())
    test_data_path: tuple[str, ...] = setting("test data with --train-data-path", ())
    mock_data: bool = setting("train on megatron-core's mock documents, which count 1, 2, 3, ..., instead of data", False)
    split: str = setting("shares of --data-path for training, validation and test", DEFAULT_SPLIT)
    data_cache_path: str | None = setting("folder for the index caches; derived: next to the data", None)
    override_data: bool = setting("resume with data other than the checkpoint's, or in another order", False)
    tokenizer_type: str | None = setting("tokenizer that the data was tokenized with", None, choices=TOKENIZERS)
    tokenizer_model: str | None = setting(
        "tokenizer.json of HuggingFaceTokenizer or a folder that contains one, a tokenizer.model of SentencePiece or Llama 3, or the token "
        "list of TikTokenizer",
        None,
    )
    vocab_file: str | None = setting("encoder.json of GPT2BPETokenizer", None)
    merge_file: str | None = setting("vocab.bpe of GPT2BPETokenizer", None)
    tiktoken_pattern: str | None = setting("how TikTokenizer splits words; derived: v2", None, choices=("v1", "v2"))
    tiktoken_num_special_tokens: int | None = setting("ids that TikTokenizer reserves for special tokens; derived: 1000", None, legal=COUNT)
    tokenizer_special_tokens: tuple[str, ...] = setting("special tokens of TikTokenizer, including <unk> <s> </s>", ())
    legacy_tokenizer: bool = setting(
        "SentencePieceTokenizer adds special tokens and ends documents with <EOD>, Llama2Tokenizer begins texts with bos", False
    )
    num_workers: int = setting("data-loading processes of each training process", 0, legal=Range(0, 1024))
    eod_mask_loss: bool = setting("leave end-of-document tokens out of the loss", False)
    mask_prob: float = setting(
        "share of the tokens that --objective masked-lm predicts", 0.15, legal=Range(0, 1, low_open=True, high_open=True)
    )
    mask_whole_words: bool = setting("mask whole words, all of their tokens together, with --objective masked-lm", False)
    reset_attention_mask: bool = setting("tokens attend only to their own document; keeps a mask of sequence x sequence", False)
    reset_position_ids: bool = setting("count positions from the last end-of-document token, with learned_absolute", False)
