"""Every refusal: what it says, that all are said at once, and that nothing is written."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys

import pytest

from megatron.lm import checks
from megatron.lm.checks import RULES, check
from megatron.lm.cli import parse_args

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3 "
    "--data-path corpus --tokenizer-type NullTokenizer --vocab-size 100"
)
PP_2 = "--pipeline-model-parallel-size 2"
# flags beside (and over) GOOD, processes, what the message must hold
REFUSALS = {
    "heads": ("--hidden-size 66", 1, "--hidden-size 66 is not divisible by --num-attention-heads 4: choose a multiple of 4"),
    "rotary width": ("--hidden-size 60", 1, "15 channels a head x --rotary-percent 1 must be an even number; change"),
    "lone groups": ("--num-query-groups 2", 1, "--num-query-groups 2 has no effect by itself: add --group-query-attention"),
    "groups": (
        "--group-query-attention --num-query-groups 3",
        1,
        "--num-attention-heads 4 is not divisible by --num-query-groups 3: choose",
    ),
    "positions": ("--max-position-embeddings 16", 1, "--max-position-embeddings 16 is less than --seq-length 32: give at least 32"),
    "reset": ("--reset-position-ids", 1, "--reset-position-ids has no effect with --position-embedding-type rope.*drop it"),
    "dropout": ("--hidden-dropout 1", 1, r"--hidden-dropout 1.0: give a number in \[0, 1\)"),
    "layers": ("--num-layers 0", 1, r"--num-layers 0: give a number in \[1, inf\)"),
    "seed": ("--seed 4294967296", 1, r"--seed 4294967296: give a number in \[0, 2147483647\]"),
    "any order": ("--deterministic --attention-backend cudnn", 1, "--deterministic with --attention-backend cudnn.*choose auto or flash"),
    "lone recompute": ("--recompute-method block", 1, "--recompute-method block has no effect by itself: add --recompute-granularity"),
    "lone modules": (
        "--recompute-modules core_attn mlp",
        1,
        "--recompute-modules core_attn mlp has no effect by itself: add --recompute-granularity selective, or drop it",
    ),
    "modules of whole layers": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules mlp",
        1,
        "--recompute-modules mlp has no effect by itself",
    ),
    "gain": ("--opt-level O2 --fp8-min-gain -1", 1, r"--fp8-min-gain -1.0: give a number in \[0, inf\)"),
    "BF16 in BF16": (
        "--bf16-linears linear_qkv linear_fc1",
        1,
        "--bf16-linears linear_qkv linear_fc1 is about .* precision bf16 has none: drop",
    ),
    "table of nothing": ("--opt-level O2 --fp8-min-gain 0 --fp8-gain-cache g", 1, "--fp8-gain-cache g has no effect with --fp8-min-gain 0"),
    "table beside a choice": (
        "--opt-level O2 --bf16-linears --fp8-gain-cache g",
        1,
        "--fp8-gain-cache g has no effect with --bf16-linears",
    ),
    "table in a folder": ("--opt-level O2 --fp8-gain-cache folder", 1, "--fp8-gain-cache folder is a folder: name a file in it"),
    "half recompute": ("--recompute-granularity full", 1, "--recompute-granularity full needs --recompute-method: add --recompute-method"),
    "recompute": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        1,
        "--recompute-num-layers 5 is more than the 4 layers of a pipeline stage: give 1 to 4",
    ),
    "recompute, virtual": (
        f"{PP_2} --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        2,
        "--recompute-num-layers 2 is more than the 1 layers of a virtual pipeline stage: give 1 to 1",
    ),
    "TP heads": (
        "--tensor-model-parallel-size 3",
        3,
        "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3: choose 3 or 6$",
    ),
    "TP heads, few": ("--tensor-model-parallel-size 8", 8, "--num-attention-heads 4 is not divisible by --tensor.* 8: choose 8$"),
    "TP heads that divide": (
        "--tensor-model-parallel-size 2 --num-attention-heads 25 --hidden-size 1600",
        2,
        "--num-attention-heads 25 is not divisible by --tensor-model-parallel-size 2: choose 20 or 32$",
    ),
    "TP hidden": (
        "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 64",
        3,
        "--hidden-size 64 is not divisible by --tensor.* 3: choose 60 or 66$",
    ),
    "TP hidden, channels": ("--tensor-model-parallel-size 3 --kv-channels 16", 3, "--hidden-size 64 is not .* 3: choose 63 or 66$"),
    "TP ffn": (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 99",
        2,
        "--ffn-hidden-size 99 is not divisible by --t.* 2: choose 98 or 100$",
    ),
    "TP groups": (
        "--tensor-model-parallel-size 2 --group-query-attention",
        2,
        "--num-query-groups 1 is not divisible by --tensor.* 2: choose 2$",
    ),
    "TP groups, both": (
        "--tensor-model-parallel-size 2 --group-query-attention --num-attention-heads 16 --num-query-groups 1",
        2,
        "--num-query-groups 1 is not divisible by --tensor-model-parallel-size 2: choose 2$",
    ),
    "SP length": (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
        2,
        "--seq-length 31 is not divisible by --tensor-model-parallel-size 2: choose 30 or 32$",
    ),
    "SP alone": (
        "--sequence-parallel",
        1,
        "--sequence-parallel splits between tensor-parallel processes, and there is one: drop it .*--no-sequence-parallel.*, or raise --t",
    ),
    "PP layers": (
        "--pipeline-model-parallel-size 3",
        3,
        "--num-layers 4 is not divisible by --pipeline-model-parallel-size 3: choose 3 or 6$",
    ),
    "PP layers, virtual": (
        "--pipeline-model-parallel-size 3 --num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
        3,
        "--num-layers 10 is not divisible by --pipeline-model-parallel-size 3: choose 12$",
    ),
    "lone virtual": (
        "--num-layers-per-virtual-pipeline-stage 2",
        1,
        "-stage 2 interleaves pipeline stages, and there is one: drop it, or raise",
    ),
    "virtual": (
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-layers-per-virtual-pipeline-stage 4",
        2,
        "virtual-pipeline-stage 4 does not divide the 6 layers of a pipeline stage: choose 3, or drop it",
    ),
    "virtual, two": (
        "--pipeline-model-parallel-size 2 --num-layers 24 --num-layers-per-virtual-pipeline-stage 5",
        2,
        "virtual-pipeline-stage 5 does not divide the 12 layers of a pipeline stage: choose 4 or 6, or drop it",
    ),
    "virtual, whole": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "virtual-pipeline-stage 2 leaves nothing to interleave: it is a whole pipeline stage: choose 1, or drop it",
    ),
    "virtual, one layer": (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        4,
        "virtual-pipeline-stage 1 leaves nothing to interleave: it is a whole pipeline stage: drop it",
    ),
    "virtual micro-batches": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6",
        2,
        "the 3 micro-batches of a step to be a multiple of --pipeline-model-parallel-size 2: choose --global-batch-size as a multiple of 4",
    ),
    "world": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "6 processes do not fit --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2: start 4 or 8, or lower the two sizes",
    ),
    "global batch": (
        "--global-batch-size 10",
        2,
        "--global-batch-size 10 is not divisible by --micro-batch-size 2 x 2 data-parallel processes: choose a multiple of 4",
    ),
    "two recipes": ("--precision fp32 --opt-level O2", 1, "--precision fp32 and --opt-level O2 contradict each other: keep one of them"),
    "bf16 and O1": ("--bf16 --opt-level O1", 1, "--opt-level O1 and --bf16 contradict each other: keep one of them"),
    "fp16 and bf16": ("--bf16 --fp16", 1, "--bf16 and --fp16 contradict each other: keep one of them"),
    "loss scale of BF16": (
        "--loss-scale 8",
        1,
        "--loss-scale 8 is about FP16, and precision bf16 has no loss scale: drop it, or use --fp16",
    ),
    "window of O2": ("--opt-level O2 --loss-scale-window 9", 1, "--loss-scale-window 9 is about FP16, and precision O2 has no loss scale"),
    "constant and moving": (
        "--fp16 --loss-scale 8 --hysteresis 3",
        1,
        "--hysteresis 3 is about a dynamic loss scale, and --loss-scale 8 is constant: drop one",
    ),
    "least above the first": (
        "--fp16 --min-loss-scale 2048 --initial-loss-scale 1024",
        1,
        "--min-loss-scale 2048 is more than --initial-loss-scale 1024: lower it",
    ),
    "loss scale of 0": ("--fp16 --loss-scale 0", 1, r"--loss-scale 0.0: give a number in \(0, inf\)"),
    "hysteresis of 0": ("--fp16 --hysteresis 0", 1, r"--hysteresis 0: give a number in \[1, inf\)"),
    "FP8 in FP16": ("--fp16 --grad-format fp8-e4m3", 1, "--grad-format fp8-e4m3 contradicts precision fp16-amp, whose formats are fixed"),
    "coat and another": (
        "--opt-level O2 --optimizer-state coat --exp-avg-format fp16",
        1,
        "--optimizer-state coat contradicts --exp-avg-format fp16: drop one, or choose coat-e4m3 or coat-e5m2",
    ),
    "coat and collage": (
        "--precision collage-fp8 --optimizer-state coat",
        1,
        "--optimizer-state coat contradicts precision collage-fp8, whose update is in BF16: drop it, or use --precision",
    ),
    "format": ("--grad-format fp8-e4m3", 1, "--grad-format fp8-e4m3 contradicts precision bf16, whose formats are fixed: drop it, or use"),
    "scaling": ("--precision fp32 --fp8-scaling current", 1, "--fp8-scaling current contradicts precision fp32.*: drop it, or use"),
    "TP wire, level": (
        "--tensor-model-parallel-size 2 --tp-wire fp8 --opt-level O2",
        2,
        "--tp-wire fp8 has no effect without --opt-level O3: drop it, or add --opt-level O3",
    ),
    "TP wire, one process": (
        "--opt-level O3 --tp-wire fp8",
        1,
        "--tp-wire fp8 has no effect without --tensor-model-parallel-size above 1: drop it, or add",
    ),
    "saved input, SP": (
        "--opt-level O3 --tensor-model-parallel-size 2 --tp-saved-input gathered",
        2,
        "--tp-saved-input gathered has no effect without --sequence-parallel: drop it, or add --sequence-parallel",
    ),
    "saved input": ("--tp-saved-input gathered", 1, "has no effect without --opt-level O3 and --sequence-parallel: drop it, or add --opt"),
    "exchange": ("--grad-exchange nccl", 2, "--grad-exchange nccl sums FP8 gradients, and precision bf16 has none: drop it, or use --opt"),
    "exchange, format that BF16 has not": (
        "--grad-format fp8-e4m3 --grad-exchange nccl",
        2,
        "--grad-exchange nccl sums FP8 gradients, and precision bf16 has none: drop it, or use --opt-level",
    ),
    "exchange, format": (
        "--opt-level O2 --grad-format fp32 --grad-exchange nccl",
        2,
        "--grad-exchange nccl sums FP8 gradients, and --grad-format fp32 leaves none: drop one, or use --grad-format fp8-e4m3 or fp8-e5m2",
    ),
    "exchange, coat": ("--precision coat --grad-exchange nccl", 2, "precision coat has none: drop it, or use --grad-format fp8-e4m3 or"),
    "accumulation": (
        "--grad-accum-dtype fp8-sr",
        1,
        "--grad-accum-dtype fp8-sr is for FP8 gradients, and precision bf16 has none; legal here is fp32: drop it, or use --opt-level O1",
    ),
    "accumulation, recipe": (
        "--precision fp32 --grad-accum-dtype bf16",
        1,
        "--grad-accum-dtype bf16 .* precision fp32 .* is fp32: drop it",
    ),
    "accumulation, format": (
        "--opt-level O1 --grad-format bf16 --grad-accum-dtype fp8",
        1,
        "--grad-accum-dtype fp8 is for FP8 .*--grad-format bf16 leaves none; legal here is fp32 or bf16: drop one, or use --grad",
    ),
    "mu": (
        "--opt-level O2 --grad-scaling auto",
        2,
        "--grad-scaling auto has no effect with --grad-exchange fp32-sum, .*has no mu: drop it, or use --grad-exchange nccl",
    ),
    "post": ("--opt-level O2 --grad-scaling post", 2, "--grad-scaling post has no effect with --grad-exchange fp32-sum"),
    "mu rule": ("--opt-level O2 --mu-rule halve", 2, "--mu-rule halve has no effect with --grad-exchange fp32-sum, .*nccl"),
    "mu rule, pre": (
        "--opt-level O2 --grad-exchange nccl --grad-scaling pre --mu-rule paper",
        2,
        "--mu-rule paper has no effect with --grad-scaling pre, whose mu is fixed: drop it, or use --grad-scaling auto",
    ),
    "world, few": ("--tensor-model-parallel-size 4", 2, "2 processes do not fit --tensor-model-parallel-size 4 .* 1: start 4, or lower"),
    "dry run": ("--device-memory-gib 40", 1, "--device-memory-gib 40 has no effect without --dry-run: add it, or drop the memory"),
    "dry run, data": ("--dry-run --data-path corpse", 1, "corpse.bin and corpse.idx do not exist"),
    "bucket": ("--ddp-bucket-size 0", 2, r"--ddp-bucket-size 0: give a number in \[1, inf\)"),
    "lr": ("--lr 0", 1, r"--lr 0.0: give a number in \(0, inf\)"),
    "lr nan": ("--lr nan", 1, r"--lr nan: give a number in \(0, inf\)"),
    "min lr": ("--min-lr 0.01", 1, r"--min-lr 0.01 is above --lr 0.001: give a value in \[0, 0.001\]"),
    "warm-up": ("--lr-warmup-iters 5", 1, r"--lr-warmup-iters 5 must end before --train-iters 5: give a number in \[0, 4\]"),
    "warm-up, decay": ("--lr-warmup-iters 3 --lr-decay-iters 3", 1, r"must end before --lr-decay-iters 3: give a number in \[0, 2\]"),
    "no data": ("--data-path", 1, "no training data: give --data-path PREFIX or --train-data-path PREFIX"),
    "no train data": ("--data-path --valid-data-path corpus", 1, "no training data beside --valid-data-path: give"),
    "data twice": ("--train-data-path corpus", 1, "--data-path and --train-data-path contradict each other: give --data-path with"),
    "split alone": ("--data-path --train-data-path corpus --split 9,1", 1, "--split 9,1 has no effect on --train-data-path: drop it, or"),
    "split words": ("--split most,rest", 1, "--split most,rest: give one to three numbers.*such as 969,30,1"),
    "split four": ("--split 1,1,1,1", 1, "--split 1,1,1,1: give one to three numbers"),
    "split sign": ("--split 2,-1", 1, "--split 2,-1: give one to three numbers, 0 or more"),
    "split empty": ("--split 0,1", 1, "--split 0,1: give one to three numbers.*the first above 0"),
    "blend": ("--data-path 0.5 corpus corpus", 1, "--data-path 0.5 corpus corpus: give prefixes alone, or a weight before each prefix"),
    "weight": ("--data-path 0.5 corpus 0 corpus", 1, "the weight 0 is not a number above 0; leave out"),
    "weights missing": ("--data-path 1 corpus corpus corpus", 1, "the weight corpus is not a number above 0; leave out"),
    "data missing": (
        "--data-path corpse",
        1,
        "--data-path corpse: corpse.bin and corpse.idx do not exist; give the prefix of what tools/prep",
    ),
    "half data": ("--data-path half", 1, "--data-path half: half.idx do not exist"),
    "tokenizer file": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        "--tokenizer-type GPT2BPETokenizer needs.*: add --merge-file",
    ),
    "tokenizer there": (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gone.json",
        1,
        "--tokenizer-model gone.json does not exist",
    ),
    "tokenizer of others": (
        "--vocab-file v",
        1,
        "--vocab-file v belongs to GPT2BPETokenizer and has no effect on .*NullTokenizer: drop it",
    ),
    "one token": ("--vocab-size 1", 1, "--vocab-size 1 leaves no token beside the end of document: give at least 2"),
    "load": ("--load gone", 1, "--load gone is no folder: name one that a run with --save wrote, or drop --load"),
    "load empty": ("--load folder", 1, r"--load folder holds no checkpoint \(latest_checkpointed_iteration.txt is missing\): name another"),
    "finetune": ("--finetune", 1, "--finetune has no effect without a checkpoint: add --load FOLDER"),
    "step": ("--ckpt-step 0", 1, "--ckpt-step 0 has no effect without a checkpoint: add --load FOLDER, or drop it"),
    "negative step": ("--ckpt-step -1 --load folder", 1, r"--ckpt-step -1: give a number in \[0, inf\)"),
    "no optimizer": ("--no-load-optim", 1, "--no-load-optim has no effect without a checkpoint: add --load FOLDER"),
    "gentle spike": ("--loss-spike-threshold 1", 1, "--loss-spike-threshold 1 calls every loss a spike: give more than 1"),
    "window alone": ("--loss-spike-window 9", 1, "--loss-spike-window 9 has no effect without --loss-spike-threshold: add it"),
    "action alone": ("--loss-spike-action rollback", 1, "--loss-spike-action rollback has no effect without --loss-spike-threshold"),
    "nowhere to roll back to": (
        "--loss-spike-threshold 2 --loss-spike-action rollback --save folder",
        1,
        "--loss-spike-action rollback goes back to checkpoints of this run: add --save FOLDER and --save-interval N, or choose warn",
    ),
    "no skipped step": ("--max-skipped-steps 0", 1, r"--max-skipped-steps 0: give a number in \[1, inf\)"),
    "no time": ("--exit-duration-in-mins 0", 1, r"--exit-duration-in-mins 0.0: give a number in \(0, inf\)"),
    "interval": ("--save-interval 2", 1, "--save-interval 2 has no effect without a folder: add --save FOLDER"),
    "keep": ("--keep-last 2", 1, "--keep-last 2 has no effect without a folder: add --save FOLDER, or drop it"),
    "keep none": ("--keep-last 0 --save new", 1, r"--keep-last 0: give a number in \[1, inf\)"),
    "background": ("--async-save", 1, "--async-save has no effect without a folder: add --save FOLDER, or drop it"),
    "save": ("--save corpus.bin", 1, "--save corpus.bin: .*corpus.bin is a file, not a folder; name another place"),
    "save below": ("--save corpus.bin/a/b", 1, "--save corpus.bin/a/b: .*corpus.bin is a file, not a folder; name another place"),
    "metrics": ("--metrics-file folder", 1, "--metrics-file folder is a folder: name a file in it"),
    "metrics below": ("--metrics-file corpus.bin/m", 1, "--metrics-file corpus.bin/m: .*corpus.bin is a file, not a folder"),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A working folder with a dataset, half a dataset, and an empty folder; nothing may appear in it."""
    for name in ("corpus.bin", "corpus.idx", "half.bin"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    yield
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx", "folder", "half.bin"]


def config(flags: str = ""):
    return parse_args(shlex.split(f"{GOOD} {flags}"))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    flags, world_size, message = REFUSALS[name]
    with pytest.raises(ValueError, match=f"(?m){message}"):
        check(config(flags), world_size)


def test_every_rule_is_proved_by_a_refusal():
    fired = set()
    for flags, world_size, _ in REFUSALS.values():
        settings = config(flags)
        for rule in RULES:
            try:
                fired |= {rule} if list(rule(settings, world_size)) else set()
            except (ValueError, ZeroDivisionError):  # a rule on values that `check` would have refused before it
                continue
    assert fired == set(RULES)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("", 3),
        ("--opt-level O0 --bf16", 2),
        ("--fp16 --initial-loss-scale 4294967296 --min-loss-scale 0.5 --loss-scale-window 1000 --hysteresis 2", 2),
        ("--precision fp16-amp --fp16 --loss-scale 8", 1),
        ("--opt-level O1 --fp8-scaling current", 2),
        ("--optimizer-state coat --exp-avg-sq-format coat-e5m2", 1),
        ("--precision fp32 --exp-avg-format coat-e4m3", 1),
        ("--opt-level O2 --master-format bf16 --grad-format fp32 --exp-avg-sq-format fp8-e5m2", 2),
        ("--opt-level O3", 1),
        ("--opt-level O3", 4),
        ("--opt-level O2 --use-distributed-optimizer", 4),
        ("--use-distributed-optimizer --no-overlap-grad-reduce --no-overlap-param-gather --grad-accum-dtype fp32", 2),
        ("--opt-level O1 --grad-exchange nccl", 1),
        ("--opt-level O1 --grad-exchange nccl --grad-scaling auto --mu-rule paper", 1),
        ("--opt-level O3 --grad-exchange nccl --mu-rule halve --grad-format fp8-e5m2", 4),
        ("--opt-level O2 --grad-exchange nccl --grad-scaling pre", 2),
        ("--opt-level O2 --grad-exchange fp32-sum --grad-accum-dtype fp8-sr --ddp-bucket-size 1 --global-batch-size 64", 2),
        ("--opt-level O2 --grad-accum-dtype fp8", 1),
        ("--opt-level O2 --grad-format fp32 --grad-accum-dtype bf16", 1),
        ("--precision fp32 --global-batch-size 12", 3),
        ("--group-query-attention --swiglu --normalization RMSNorm", 1),
        ("--hidden-size 66 --kv-channels 16", 1),
        ("--position-embedding-type learned_absolute --max-position-embeddings 64 --reset-position-ids", 1),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1),
        ("--recompute-granularity selective", 1),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", 1),
        ("--data-path 0.3 corpus 0.7 corpus --split 1", 1),
        ("--data-path corpus corpus --split 90,10", 1),
        ("--data-path --train-data-path corpus --valid-data-path corpus", 1),
        ("--save new/run --save-interval 2 --metrics-file new/run/m.jsonl --tensorboard-dir folder", 1),
        ("--save new/run --save-interval 2 --load new/run/", 1),
        ("--save new/run --async-save --keep-last 1 --load new/run --ckpt-step 0", 1),
        ("--save new/run --save-interval 2 --loss-spike-threshold 1.5 --loss-spike-window 9 --loss-spike-action rollback", 1),
        ("--lr-warmup-iters 4 --min-lr 1e-3", 1),
        ("--opt-level O3 --tensor-model-parallel-size 2 --tp-wire fp8", 2),
        ("--opt-level O3 --tensor-model-parallel-size 2 --sequence-parallel --tp-wire fp8 --tp-saved-input gathered", 4),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4", 2),
        ("--opt-level O1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    ],
)
def test_legal_settings_pass(flags, world_size):
    check(config(flags), world_size)


def test_a_dry_run_needs_no_data_and_no_tokenizer():
    check(parse_args(shlex.split("--preset 175b --dry-run --device-memory-gib 80")), 128)


def test_all_problems_are_told_at_once_even_beside_values_out_of_range():
    with pytest.raises(ValueError, match="3 settings are refused, nothing was started") as caught:
        check(config("--num-attention-heads 0 --lr-warmup-iters 9 --opt-level O2 --bf16"), 1)
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["--num-attention-heads", "--opt-level", "--lr-warmup-iters"]
    assert all(line.startswith("- ") for line in lines[1:])


def test_settings_that_did_not_come_from_flags_are_judged_too():
    good = config()
    odd = dataclasses.replace(good, precision=dataclasses.replace(good.precision, opt_level="O4"))
    with pytest.raises(ValueError, match="--opt-level O4: choose one of O0, O1, O2, O3"):
        check(odd, 1)
    infinite = dataclasses.replace(good, optimizer=dataclasses.replace(good.optimizer, clip_grad=math.inf))
    with pytest.raises(ValueError, match="--clip-grad inf: give a number in"):
        check(infinite, 1)
    nameless = dataclasses.replace(good, data=dataclasses.replace(good.data, tokenizer_type=None))
    with pytest.raises(ValueError, match="--tokenizer-type is missing: choose one of GPT2BPETokenizer"):
        check(nameless, 1)


def test_a_checkpoint_folder_is_recognised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / checks.LATEST_CHECKPOINT_FILE).write_text("10")
    check(config(f"--load {folder} --finetune --no-load-rng"), 1)


def test_folders_without_permission_are_refused(monkeypatch):
    # By hand, because root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="2 settings are refused") as caught:
        check(config("--save folder/new --metrics-file corpus.bin"), 1)
    assert "--save folder/new: no permission to write in" in str(caught.value)
    assert "--metrics-file corpus.bin cannot be written: change its permissions, or name another" in str(caught.value)


def test_checking_imports_neither_torch_nor_megatron_core():
    program = "import sys, megatron.lm.checks; sys.exit(any(m == 'torch' or m.startswith('megatron.core') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True)
