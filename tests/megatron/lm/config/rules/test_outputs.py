"""Refusals about what a run writes and reads back."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.outputs import RULES

# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
REFUSALS = {
    "table in a folder": ("--opt-level O2 --fp8-gain-cache folder", 1, "--fp8-gain-cache folder is a folder: give a file in it"),
    "dry run": ("--device-memory-gib 40", 1, "--device-memory-gib 40 has no effect without --dry-run: add it, or drop the memory"),
    "load": ("--load gone", 1, "--load gone is not a folder: give one that a run with --save wrote, or drop --load"),
    "load empty": ("--load folder", 1, r"--load folder contains no checkpoint \(and no latest_checkpointed_iteration.txt\): give another"),
    "two schedules": (
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: give one of them",
    ),
    "finetune": ("--finetune", 1, "--finetune has no effect without a checkpoint: add --load FOLDER"),
    "step": ("--ckpt-step 0", 1, "--ckpt-step 0 has no effect without a checkpoint: add --load FOLDER, or drop it"),
    "no optimizer": ("--no-load-optim", 1, "--no-load-optim has no effect without a checkpoint: add --load FOLDER"),
    "gentle spike": ("--loss-spike-threshold 1", 1, "--loss-spike-threshold 1 makes every loss a spike: give more than 1"),
    "window alone": ("--loss-spike-window 9", 1, "--loss-spike-window 9 has no effect without --loss-spike-threshold: add it"),
    "action alone": ("--loss-spike-action rollback", 1, "--loss-spike-action rollback has no effect without --loss-spike-threshold"),
    "nowhere to roll back to": (
        "--loss-spike-threshold 2 --loss-spike-action rollback --save folder",
        1,
        "--loss-spike-action rollback goes back to checkpoints of this run: add --save FOLDER and --save-interval N, or choose warn",
    ),
    "empty profile": (
        "--profile --profile-step-start 5 --profile-step-end 5",
        1,
        "--profile-step-start 5 is not below --profile-step-end 5: the iterations 6 to 5 are profiled",
    ),
    "profile of no rank": ("--profile --profile-ranks 1", 1, r"--profile-ranks 1: give ranks in \[0, 0\], since there are 1 processes"),
    "profile without a folder": (
        "--profile --use-pytorch-profiler",
        1,
        "--use-pytorch-profiler needs a folder for its trace: add --tensorboard-dir FOLDER",
    ),
    "interval": ("--save-interval 2", 1, "--save-interval 2 has no effect without a folder: add --save FOLDER"),
    "elsewhere": ("--emergency-save there", 1, "--emergency-save there has no effect without --save: add --save FOLDER, or drop it"),
    "elsewhere in a file": (
        "--save new --emergency-save corpus.bin",
        1,
        "--emergency-save corpus.bin: .*corpus.bin is a file, not a folder",
    ),
    "elsewhere is there": (
        "--save new --emergency-save ./new",
        1,
        "--emergency-save ./new is also the folder of --save: give one on another disk",
    ),
    "unhealthy": ("--load-unhealthy --load folder", 1, "--load-unhealthy has no effect by itself: give the checkpoint with --ckpt-step N"),
    "keep": ("--keep-last 2", 1, "--keep-last 2 has no effect without a folder: add --save FOLDER, or drop it"),
    "background": ("--async-save", 1, "--async-save has no effect without a folder: add --save FOLDER, or drop it"),
    "no states": ("--no-save-optim", 1, "--no-save-optim has no effect without a folder: add --save FOLDER, or drop it"),
    "no generators": ("--no-save-rng", 1, "--no-save-rng has no effect without a folder: add --save FOLDER, or drop it"),
    "no states to roll back to": (
        "--save new --save-interval 2 --no-save-optim --loss-spike-threshold 2 --loss-spike-action rollback",
        1,
        "--loss-spike-action rollback goes back to a checkpoint with the optimizer's state: drop --no-save-optim, or choose warn",
    ),
    "non-persistent": (
        "--non-persistent-save-interval 2",
        1,
        "--non-persistent-save-interval 2 has no effect without a folder: add --save FOLDER, or drop it",
    ),
    "folder of no non-persistent ones": (
        "--save new --non-persistent-global-ckpt-dir fast",
        1,
        "--non-persistent-global-ckpt-dir fast has no effect without --non-persistent-save-interval: add it, or drop the folder",
    ),
    "non-persistent in --save": (
        "--save new --non-persistent-save-interval 2 --non-persistent-global-ckpt-dir ./new",
        1,
        "--non-persistent-global-ckpt-dir ./new is also the folder of --save: give another",
    ),
    "missing": (
        "--exit-on-missing-checkpoint",
        1,
        "--exit-on-missing-checkpoint has no effect without a checkpoint: add --load FOLDER, or drop it",
    ),
    "arguments of no checkpoint": (
        "--use-mp-args-from-checkpoint-args --load folder",
        1,
        "--use-mp-args-from-checkpoint-args has no effect without --use-checkpoint-args: add it, or drop this",
    ),
    "save": ("--save corpus.bin", 1, "--save corpus.bin: .*corpus.bin is a file, not a folder; choose another path"),
    "save below": ("--save corpus.bin/a/b", 1, "--save corpus.bin/a/b: .*corpus.bin is a file, not a folder; choose another path"),
    "project missing": ("--wandb-exp-name a", 1, "--wandb-exp-name a has no effect without a project: add --wandb-project TEXT"),
    "metrics": ("--metrics-file folder", 1, "--metrics-file folder is a folder: give a file in it"),
    "metrics below": ("--metrics-file corpus.bin/m", 1, "--metrics-file corpus.bin/m: .*corpus.bin is a file, not a folder"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
