"""All problems are said at once, single values are judged by their fields, and nothing is written."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys
from typing import get_type_hints

import pytest

from helpers import refusals
from helpers.refusals import config
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from megatron.lm.config.cli import parse_args, section_types
from megatron.lm.config.rules.check import RULES, check, single_values
from megatron.lm.config.sections.schema import flag

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    ("--precision int8", "--precision int8: choose one of fp32, fp16-amp, bf16, .*coat, O1, O2, O3"),
    ("--opt-level O2 --fp8-recipe rowwise", "--fp8-recipe rowwise: choose one of delayed, tensorwise"),
    ("--opt-level O2 --fp8-amax-history-len 0", r"--fp8-amax-history-len 0: give a number in \[1, 65536\]"),
    ("--opt-level O2 --fp8-amax-compute-algo mean", "--fp8-amax-compute-algo mean: choose one of max, most_recent"),
    ("--opt-level O2 --fp8-margin 17", r"--fp8-margin 17: give a number in \[0, 16\]"),
    ("--opt-level O2 --grad-exchange mpi", "--grad-exchange mpi: choose one of fp32-sum, nccl"),
    ("--hidden-dropout 1", r"--hidden-dropout 1.0: give a number in \[0, 1\)"),
    ("--num-layers 0", r"--num-layers 0: give a number in \[1, 10000\]"),
    ("--seed 4294967296", r"--seed 4294967296: give a number in \[0, 2147483647\]"),
    ("--opt-level O2 --fp8-min-gain -1", r"--fp8-min-gain -1.0: give a number in \[0, 1e\+30\]"),
    ("--fp16 --loss-scale 0", r"--loss-scale 0.0: give a number in \(0, 1e\+30\]"),
    ("--fp16 --hysteresis 0", r"--hysteresis 0: give a number in \[1, 2147483647\]"),
    ("--ddp-bucket-size 0", r"--ddp-bucket-size 0: give a number in \[1, 2147483647\]", 2),
    ("--lr 0", r"--lr 0.0: give a number in \(0, 1e\+30\]"),
    ("--lr nan", r"--lr nan: give a number in \(0, 1e\+30\]"),
    ("--ckpt-step -1 --load folder", r"--ckpt-step -1: give a number in \[0, 2147483647\]"),
    ("--max-skipped-steps 0", r"--max-skipped-steps 0: give a number in \[1, 2147483647\]"),
    ("--exit-duration-in-mins 0", r"--exit-duration-in-mins 0.0: give a number in \(0, 1e\+30\]"),
    ("--train-iters 100000000000000000000", r"--train-iters 100000000000000000000: give a number in \[1, 2147483647\]"),
    ("--num-layers 100000000", r"--num-layers 100000000: give a number in \[1, 10000\]"),
    ("--hidden-size 100000000", r"--hidden-size 100000000: give a number in \[1, 16777216\]"),
    ("--kv-channels 1000000000", r"--kv-channels 1000000000: give a number in \[1, 16777216\]"),
    ("--vocab-size 1000000000000", r"--vocab-size 1000000000000: give a number in \[1, 2147483647\]"),
    ("--lr 1e38", r"--lr 1e\+38: give a number in \(0, 1e\+30\]"),
    ("--distributed-timeout-minutes 1e300", r"--distributed-timeout-minutes 1e\+300: give a number in \(0, 525600\]"),
    ("--loss-spike-window 100000000000000000000", r"--loss-spike-window 10+: give a number in \[1, 1000000\]"),
    ("--num-workers 100000000", r"--num-workers 100000000: give a number in \[0, 1024\]"),
    ("--adam-beta1 0.9999999999999999", r"--adam-beta1 0.9+: give a number in \[0, 0.9999999\]"),
    ("--keep-last 0 --save new", r"--keep-last 0: give a number in \[1, 2147483647\]"),
    ("--save ''", r"--save '' is empty \(is a shell variable unset\?\): give a value, or drop the flag"),
    ("--load ' '", r"--load ' ' is empty"),
    ("--data-path ''", r"--data-path '' is empty"),
    ("--data-path corpus ''", r"--data-path '' is empty"),
]


@pytest.mark.promise("Starting and ending", "Impossible sizes and numbers are refused with their legal range.")
@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_refusal_names_value_and_remedy(refusal):
    refusals.assert_refused(*refusal)


def test_every_rule_names_sections():
    sections = {field.name for field in dataclasses.fields(config())}
    assert all(names and set(names) <= sections for names in RULES.values())


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("", 3),
        ("--opt-level O0 --bf16", 2),
        ("--fp16 --initial-loss-scale 4294967296 --min-loss-scale 0.5 --loss-scale-window 1000 --hysteresis 2", 2),
        ("--precision fp16-amp --fp16 --loss-scale 8", 1),
        ("--opt-level O1 --fp8-recipe tensorwise", 2),
        ("--opt-level O2 --fp8-amax-history-len 4 --fp8-amax-compute-algo most_recent --fp8-margin 1", 2),
        ("--precision coat --fp8-recipe delayed --fp8-amax-history-len 4", 2),
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
    (folder / LATEST_CHECKPOINT_FILE).write_text("10")
    check(config(f"--load {folder} --finetune --no-load-rng"), 1)


def test_folders_without_permission_are_refused(monkeypatch):
    # By hand, because root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="2 settings are refused") as caught:
        check(config("--save folder/new --metrics-file corpus.bin"), 1)
    assert "--save folder/new: no permission to write in" in str(caught.value)
    assert "--metrics-file corpus.bin cannot be written: change its permissions, or choose another path" in str(caught.value)


@pytest.mark.promise("Starting and ending", "A path that is not UTF-8 is refused.")
def test_a_path_that_is_no_utf_8_is_refused():
    with pytest.raises(ValueError, match=r"--save 'new/\\udcff' is not valid UTF-8: rename it, or the file"):
        check(parse_args([*shlex.split(refusals.GOOD), "--save", os.fsdecode(b"new/\xff")]), 1)


def test_a_pipe_takes_no_lines_and_a_device_is_no_cache(tmp_path_factory):
    pipe = tmp_path_factory.mktemp("pipe") / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="2 settings are refused") as caught:
        check(config(f"--metrics-file {pipe} --opt-level O2 --fp8-gain-cache /dev/null"), 1)
    assert f"--metrics-file {pipe} is not a regular file: give one" in str(caught.value)
    assert "--fp8-gain-cache /dev/null is not a regular file: give one" in str(caught.value)
    check(config("--metrics-file /dev/null --record-precision /dev/null --opt-level O2"), 1)


def test_the_checker_itself_imports_neither_torch_nor_megatron_core():
    program = (
        "import sys, megatron.lm.config.rules.check; sys.exit(any(m == 'torch' or m.startswith('megatron.core') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.promise("Checkpoints", "No flag accepts an empty path.")
def test_no_text_may_be_empty():
    """Each flag that takes a path, and every other one that takes words."""
    sections = {name: get_type_hints(cls) for name, cls in section_types().items()}
    texts = [(section, name) for section, hints in sections.items() for name, hint in hints.items() if "str" in str(hint)]
    assert {"save", "load", "data_path", "tensorboard_dir", "metrics_file", "data_cache_path", "vocab_file"} <= {name for _, name in texts}
    good = config()
    for section, name in texts:
        value = ("",) if "tuple" in str(sections[section][name]) else ""
        changed = dataclasses.replace(getattr(good, section), **{name: value})
        assert any(f"{flag(name)} '' is empty" in problem for problem in single_values(changed)), name
