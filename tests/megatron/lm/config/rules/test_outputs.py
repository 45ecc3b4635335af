"""Refusals about what a run writes and reads back."""

from helpers import refusals
from megatron.lm.config.rules.outputs import RULES

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    ("--opt-level O2 --fp8-gain-cache folder", "--fp8-gain-cache folder is a folder: give a file in it"),
    ("--device-memory-gib 40", "--device-memory-gib 40 has no effect without --dry-run: add it, or drop the memory"),
    ("--load gone", "--load gone is not a folder: give one that a run with --save wrote, or drop --load"),
    ("--load folder", r"--load folder contains no checkpoint \(and no latest_checkpointed_iteration.txt\): give another"),
    (
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: give one of them",
    ),
    ("--finetune", "--finetune has no effect without a checkpoint: add --load FOLDER"),
    ("--ckpt-step 0", "--ckpt-step 0 has no effect without a checkpoint: add --load FOLDER, or drop it"),
    ("--no-load-optim", "--no-load-optim has no effect without a checkpoint: add --load FOLDER"),
    ("--loss-spike-threshold 1", "--loss-spike-threshold 1 makes every loss a spike: give more than 1"),
    ("--loss-spike-window 9", "--loss-spike-window 9 has no effect without --loss-spike-threshold: add it"),
    ("--loss-spike-action rollback", "--loss-spike-action rollback has no effect without --loss-spike-threshold"),
    (
        "--loss-spike-threshold 2 --loss-spike-action rollback --save folder",
        "--loss-spike-action rollback goes back to checkpoints of this run: add --save FOLDER and --save-interval N, or choose warn",
    ),
    (
        "--profile --profile-step-start 5 --profile-step-end 5",
        "--profile-step-start 5 is not below --profile-step-end 5: the iterations 6 to 5 are profiled",
    ),
    ("--profile --profile-ranks 1", r"--profile-ranks 1: give ranks in \[0, 0\], since there are 1 processes"),
    ("--profile --use-pytorch-profiler", "--use-pytorch-profiler needs a folder for its trace: add --tensorboard-dir FOLDER"),
    ("--save-interval 2", "--save-interval 2 has no effect without a folder: add --save FOLDER"),
    ("--load-unhealthy --load folder", "--load-unhealthy has no effect by itself: give the checkpoint with --ckpt-step N"),
    ("--keep-last 2", "--keep-last 2 has no effect without a folder: add --save FOLDER, or drop it"),
    ("--async-save", "--async-save has no effect without a folder: add --save FOLDER, or drop it"),
    ("--no-save-optim", "--no-save-optim has no effect without a folder: add --save FOLDER, or drop it"),
    ("--no-save-rng", "--no-save-rng has no effect without a folder: add --save FOLDER, or drop it"),
    (
        "--save new --save-interval 2 --no-save-optim --loss-spike-threshold 2 --loss-spike-action rollback",
        "--loss-spike-action rollback goes back to a checkpoint with the optimizer's state: drop --no-save-optim, or choose warn",
    ),
    ("--non-persistent-save-interval 2", "--non-persistent-save-interval 2 has no effect without a folder: add --save FOLDER, or drop it"),
    (
        "--save new --non-persistent-global-ckpt-dir fast",
        "--non-persistent-global-ckpt-dir fast has no effect without --non-persistent-save-interval: add it, or drop the folder",
    ),
    (
        "--save new --non-persistent-save-interval 2 --non-persistent-global-ckpt-dir ./new",
        "--non-persistent-global-ckpt-dir ./new is also the folder of --save: give another",
    ),
    ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint has no effect without a checkpoint: add --load FOLDER, or drop it"),
    (
        "--use-mp-args-from-checkpoint-args --load folder",
        "--use-mp-args-from-checkpoint-args has no effect without --use-checkpoint-args: add it, or drop this",
    ),
    ("--save corpus.bin", "--save corpus.bin: .*corpus.bin is a file, not a folder; choose another path"),
    ("--save corpus.bin/a/b", "--save corpus.bin/a/b: .*corpus.bin is a file, not a folder; choose another path"),
    ("--wandb-exp-name a", "--wandb-exp-name a has no effect without a project: add --wandb-project TEXT"),
    ("--metrics-file folder", "--metrics-file folder is a folder: give a file in it"),
    ("--metrics-file corpus.bin/m", "--metrics-file corpus.bin/m: .*corpus.bin is a file, not a folder"),
]


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)
