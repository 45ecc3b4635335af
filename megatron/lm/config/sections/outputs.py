"""Settings of logs, checkpoints, and fault handling."""

import os
from dataclasses import dataclass

from megatron.lm.config.sections.schema import COUNT, COUNT_OR_ZERO, NON_NEGATIVE, POSITIVE, Range, setting

LATEST_CHECKPOINT_FILE = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging, metrics and the precision recorder."""

    log_interval: int = setting("iterations between log lines", 100, legal=COUNT)
    megatron_log: bool = setting("print Megatron-LM's log lines, for programs that read them", False)
    log_level: str = setting("debug also prints every module of the model at the start", "info", choices=("info", "debug"))
    log_params_norm: bool = setting("log the L2 norm of the parameters, or of their masters if there are any", False)
    log_num_zeros_in_grad: bool = setting("log how many elements of the averaged gradients are zero", False)
    tensorboard_dir: str | None = setting("folder for TensorBoard's event files", None)
    wandb_project: str | None = setting("project of Weights & Biases to log to; needs the package wandb", None)
    wandb_exp_name: str | None = setting("name of the run in --wandb-project", None)
    wandb_save_dir: str | None = setting("folder for the files of Weights & Biases; derived: wandb in --save", None)
    wandb_entity: str | None = setting("user or team that owns --wandb-project; derived: wandb's default", None)
    metrics_file: str | None = setting("file to which every measurement is appended, one JSON object per line", None)
    peak_tflops: float | None = setting(
        "peak TFLOP/s of one device, for MFU; derived on H100 and H200: 989 (BF16) and 1979 (FP8)", None, legal=POSITIVE
    )
    dry_run: bool = setting("print the grid, and parameters and bytes per process, without training; exit code 2 if it does not fit", False)
    device_memory_gib: float | None = setting(
        "memory of one device, for --dry-run; derived: this machine's GPU, or an H100's 79", None, legal=POSITIVE
    )
    record_precision: str | None = setting(
        "file of the precision recorder: the precision that each tensor lost, one JSON object per recorded step", None
    )
    record_interval: int = setting("iterations between the steps that --record-precision records", 500, legal=COUNT)


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of steps, and the history of GPU memory."""

    profile: bool = setting("profile some iterations for nsys, or with --use-pytorch-profiler", False)
    use_pytorch_profiler: bool = setting("profile with torch.profiler, which writes a trace to --tensorboard-dir", False)
    profile_step_start: int = setting("iterations before the first one that --profile profiles", 10, legal=COUNT_OR_ZERO)
    profile_step_end: int = setting("last iteration that --profile profiles", 12, legal=COUNT)
    profile_ranks: tuple[int, ...] = setting("ranks that --profile profiles", (0,), legal=COUNT_OR_ZERO)
    record_memory_history: bool = setting("record allocations of the last rank's GPU, and write them at --log-interval", False)
    memory_snapshot_path: str = setting("file that --record-memory-history writes, for pytorch.org/memory_viz", "snapshot.pickle")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = setting("folder to save checkpoints in", None)
    load: str | None = setting("folder with the checkpoint to start from", None)
    ckpt_format: str = setting(
        "format of --save: own keeps every bit of the run's formats; torch_dist is Megatron-LM's, with FP32 masters and moments of AdamW, "
        "which plain megatron-core loads; --load reads both",
        "own",
        choices=("own", "torch_dist"),
    )
    save_interval: int | None = setting("iterations between checkpoints; derived: only one, at the end", None, legal=COUNT)
    no_save_optim: bool = setting(
        "do not save the optimizer's moments and steps, and save masters only of FP8 weights: a resume starts with a new optimizer state",
        False,
    )
    no_save_rng: bool = setting("do not save the states of the random generators: a resume starts them from --seed", False)
    non_persistent_save_interval: int | None = setting(
        "iterations between additional checkpoints, of which only the newest is kept; a start loads the newest of these and those of "
        "--save-interval",
        None,
        legal=COUNT,
    )
    non_persistent_global_ckpt_dir: str | None = setting(
        "folder of the checkpoints of --non-persistent-save-interval; derived: non_persistent in --save", None
    )
    async_save: bool = setting("write checkpoints in the background, from a copy in the host's memory, while training continues", False)
    keep_last: int | None = setting("newest checkpoints to keep in --save; derived: all", None, legal=COUNT)
    ckpt_step: int | None = setting("iteration of the checkpoint to load; derived: the newest healthy one", None, legal=COUNT_OR_ZERO)
    load_unhealthy: bool = setting("load the checkpoint of --ckpt-step even if it is marked unhealthy", False)
    finetune: bool = setting("load only the weights and start at iteration 0", False)
    no_load_optim: bool = setting("do not load the optimizer's state", False)
    no_load_rng: bool = setting("do not load the state of the random generators", False)
    override_opt_param_scheduler: bool = setting(
        "resume with the learning-rate schedule and weight decay of the flags if the checkpoint's differ; without it, such a resume is "
        "refused",
        False,
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        "resume with the checkpoint's learning-rate schedule and weight decay, whatever the flags are", False
    )
    exit_on_missing_checkpoint: bool = setting(
        "end the run if --load, which is also the folder of --save, contains no checkpoint yet", False
    )
    use_checkpoint_args: bool = setting(
        "take the flags of the model and its tokenizer from the checkpoint in --load, overriding the command line; flags that Megatron-LM "
        "does not override, such as --num-layers, stay as given",
        False,
    )
    use_mp_args_from_checkpoint_args: bool = setting("with --use-checkpoint-args, also take the flags of TP and PP", False)
    no_use_tokenizer_model_from_checkpoint_args: bool = setting("with --use-checkpoint-args, take no flags of the tokenizer", False)

    def non_persistent_folder(self, root: str) -> str | None:
        """Return the folder of non-persistent checkpoints for those in `root`; None without `--non-persistent-save-interval`."""
        if self.non_persistent_save_interval is None:
            return None
        return self.non_persistent_global_ckpt_dir or os.path.join(root, "non_persistent")

    @property
    def resumes_itself(self) -> bool:
        """Whether the run resumes from its own checkpoints: `--load` is the folder of `--save`, which is empty at the first start."""
        if self.load is None or self.save is None or self.finetune:
            return False
        return os.path.realpath(self.load) == os.path.realpath(self.save)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Handling of skipped steps and loss spikes."""

    max_skipped_steps: int = setting("consecutive steps without a finite loss and gradient after which the run ends", 20, legal=COUNT)
    loss_spike_threshold: float = setting(
        "a loss above this many times the mean of the last losses is a spike; 0: never", 0.0, legal=NON_NEGATIVE
    )
    loss_spike_window: int = setting(
        "steps over which --loss-spike-threshold takes the mean; no spike is detected before that many steps", 100, legal=Range(1, 10**6)
    )
    loss_spike_action: str = setting(
        "at a spike: warn, or go back to the newest checkpoint in --save and skip the data read since", "warn", choices=("warn", "rollback")
    )
