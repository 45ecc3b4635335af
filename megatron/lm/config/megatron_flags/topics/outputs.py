"""Flags of checkpoints, logs and profiles."""

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, translated

FORMAT = "checkpoints are written and read in parallel on any grid, in the trainer's own format or with --ckpt-format torch_dist"
METRICS = "it is always written, to --tensorboard-dir and --metrics-file"
MEMORY = "peak allocated memory is always reported at --log-interval, in the log, --tensorboard-dir and --metrics-file"
PROGRESS = "no `progress.txt` is written next to the checkpoints: --metrics-file contains tokens and throughput at each --log-interval"
TIMERS = "the log contains time, throughput and bytes per step; parts of a step are not timed"
LOCAL = (
    "all ranks write non-persistent checkpoints to one folder: drop it, or give one on a fast disk with --non-persistent-global-ckpt-dir"
)

FLAGS = (
    *accepted(
        "--save FOLDER",
        "--save-interval N",
        "--load FOLDER",
        "--ckpt-step N",
        "--ckpt-format torch_dist",
        "--async-save",
        "--finetune",
        "--no-load-optim",
        "--no-load-rng",
        "--override-opt_param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
        "--no-save-optim",
        "--no-save-rng",
        "--exit-on-missing-checkpoint",
        "--use-checkpoint-args",
        "--use-mp-args-from-checkpoint-args",
        "--no-use-tokenizer-model-from-checkpoint-args",
        "--non-persistent-save-interval N",
        "--non-persistent-global-ckpt-dir FOLDER",
        "--log-interval N",
        "--tensorboard-dir FOLDER",
        "--wandb-project TEXT",
        "--wandb-exp-name TEXT",
        "--wandb-save-dir FOLDER",
        "--wandb-entity TEXT",
        "--profile",
        "--profile-step-start N",
        "--profile-step-end N",
        "--profile-ranks N...",
        "--use-pytorch-profiler",
        "--record-memory-history",
        "--memory-snapshot-path FILE",
        "--log-params-norm",
        "--log-num-zeros-in-grad",
    ),
    *translated("--save-interval N", "--persistent-save-interval N"),
    *translated("--no-use-tokenizer-model-from-checkpoint-args", "--disable-use-tokenizer-model-from-checkpoint-args"),
    *dropped("it is the only type here", "--non-persistent-ckpt-type global"),
    *dropped(
        f"{FORMAT}; a checkpoint that Megatron-LM wrote in this format is refused: save it once more there with --ckpt-format torch_dist",
        "--ckpt-format torch",
        "--ckpt-format torch_dcp",
    ),
    *dropped(
        FORMAT,
        "--use-dist-ckpt",
        "--dist-ckpt-format TEXT",
        "--auto-detect-ckpt-format",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--disable-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
        "--dist-ckpt-strictness TEXT",
        "--dist-ckpt-save-pre-mcore-014",
        "--dist-ckpt-optim-fully-reshardable",
        "--distrib-optim-fully-reshardable-mem-efficient",
        "--use-persistent-ckpt-worker",
        "--ckpt-convert-update-legacy-dist-opt-format",
    ),
    *dropped(
        METRICS,
        "--log-throughput",
        "--log-validation-ppl-to-tensorboard",
        "--log-learning-rate-to-tensorboard",
    ),
    *dropped(MEMORY, "--log-memory-to-tensorboard", "--log-memory-interval N", "--log-device-memory-used"),
    *dropped("the number of processes is constant during a run: the launcher sets it", "--log-world-size-to-tensorboard"),
    *dropped(PROGRESS, "--log-progress"),
    *dropped(
        "the loss scale is always written if there is one (FP16)",
        "--no-log-loss-scale-to-tensorboard",
        "--disable-log-loss-scale-to-tensorboard",
    ),
    *dropped(
        "TensorBoard receives what the log does, at --log-interval, immediately",
        "--tensorboard-log-interval N",
        "--tensorboard-queue-size N",
    ),
    *dropped(TIMERS, "--log-timers-to-tensorboard", "--timing-log-level N", "--timing-log-option TEXT", "--no-barrier-with-level-1-timing"),
    *dropped(
        "the log names a stuck rank after --distributed-timeout-minutes; DCGM finds slow GPUs",
        "--log-straggler",
        "--disable-straggler-on-startup",
        "--straggler-ctrlr-port N",
        "--straggler-minmax-count N",
    ),
    *dropped("all of the trainer logs at one level", "--logging-level N", "--config-logger-dir FOLDER", "--run-workload-inspector-server"),
    *refused(
        "it is not supported: --record-precision records the precision that each tensor of a step loses",
        "--log-max-attention-logit",
        "--log-energy",
        "--save-wgrads-interval N",
        "--save-dgrads-interval N",
    ),
    *refused(
        LOCAL,
        "--non-persistent-ckpt-type TEXT",
        "--non-persistent-local-ckpt-dir FOLDER",
        "--non-persistent-local-ckpt-algo TEXT",
        "--replication",
        "--replication-jump N",
        "--replication-factor N",
    ),
    *refused("the trainer keeps all checkpoints of --save-interval, or the newest: use --keep-last", "--save-retain-interval N"),
    *refused("give the checkpoint with --load and --finetune", "--pretrained-checkpoint FOLDER", "--load-main-params-from-ckpt"),
    *refused("convert with `python -m megatron.lm.tools.convert_checkpoint`", "--ckpt-convert-format TEXT", "--ckpt-convert-save FOLDER"),
    *refused(
        "checkpoints of FSDP are not supported: use --ckpt-format torch_dist",
        "--ckpt-format fsdp_dtensor",
        "--no-strict-fsdp-dtensor-load",
        "--disable-strict-fsdp-dtensor-load",
    ),
)
