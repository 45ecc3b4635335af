"""A configuration is validated before anything starts: every problem is reported at once, each with the flag that caused it."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from helpers import refusals
from helpers.refusals import config
from megatron.lm.config import LATEST_CHECKPOINT_FILE, Config
from megatron.lm.config.cli import parse_args, section_types
from megatron.lm.config.rules.check import RULES, check, single_values
from megatron.lm.config.rules.table import PRECISIONS, Condition, RuleRow, conflicts, rows
from megatron.lm.config.sections.schema import choices_of, flag
from msamp.comm import exchange
from msamp.numerics import recipe

MOE = "--num-experts 8 --swiglu --disable-bias-linear"
GROUPS = f"{MOE} --moe-router-num-groups 4"
WHOLE_EXPERTS = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
TP, PP, EP = (f"--{name}-model-parallel-size 2" for name in ("tensor", "pipeline", "expert"))
CP = "--context-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method block"
SAMPLES = "--train-iters --train-samples 80 --global-batch-size 8"  # --train-iters without a value: see `settings`
# By number of processes: flags beside (and over) those of `refusals.GOOD`. The refusal names the first one, or `flag` of "flag | flags".
REFUSED = {
    1: f"""
--precision int8
--fp8-recipe rowwise --opt-level O2
--fp8-amax-history-len 0 --opt-level O2
--hidden-dropout 1
--num-layers 0
--seed 4294967296
--fp8-min-gain -1 --opt-level O2
--lr nan
--lr 1e38
--ckpt-step -1 --load folder
--train-iters 100000000000000000000
--adam-beta1 0.9999999999999999
--save ''
--data-path corpus ''
--hidden-size 66
--rotary-percent | --hidden-size 60
--num-attention-heads | --group-query-attention --num-query-groups 3
--max-position-embeddings 16
--rope-scaling-factor 0.5 --use-rope-scaling
--moe-router-topk 9 {MOE}
--moe-router-topk 1 {MOE}
--num-experts | {MOE} --moe-router-num-groups 3 --moe-router-group-topk 2
--moe-router-group-topk 5 {GROUPS}
--moe-router-topk 3 {GROUPS} --moe-router-group-topk 2
--moe-router-topk 4 {GROUPS} --moe-router-group-topk 1
--moe-layer-freq [0,1] {MOE}
--moe-layer-freq [0]*4 {MOE}
--expert-tensor-parallel-size 2 {MOE}
--num-experts | {MOE} --opt-level O2 --fp8-recipe blockwise
--num-experts | {MOE} --precision te-bf16
--precision fp32 --opt-level O2
--bf16 --fp16
--grad-format fp8-e4m3 --fp16
--optimizer-state coat --opt-level O2 --exp-avg-format fp16
--optimizer-state coat --precision collage-fp8
--optimizer-state coat --precision te-bf16
--optimizer muon --precision bf16
--optimizer muon --opt-level O2 --tensor-model-parallel-size 2
--optimizer sgd --precision collage-plus
--optimizer sgd --ckpt-format torch_dist --save new
--load folder --precision te-delayed --save folder
--fp8-guard --opt-level O2 --bf16-linears linear_qkv linear_proj linear_fc1 linear_fc2
--smooth-swiglu --opt-level O2 --swiglu --fp8-recipe blockwise
--smooth-swiglu --precision coat --swiglu
--num-layers-at-end-in-bf16 3 --opt-level O2 --first-last-layers-bf16
--num-layers-at-start-in-bf16 0 --opt-level O2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0
--fp8-fast-accumulation all --opt-level O2 --fp8-recipe blockwise
--attention-precision fp8 --opt-level O2 --kv-channels 24
--fp8-amax-history-len 16 --opt-level O2 --fp8-recipe tensorwise
--fp8-amax-compute-algo max --precision coat
--fp8-gain-cache g --opt-level O2 --fp8-min-gain 0
--fp8-gain-cache g --opt-level O2 --bf16-linears
--min-loss-scale 2048 --fp16 --initial-loss-scale 1024
--grad-accum-dtype fp8-sr
--grad-accum-dtype bf16 --precision fp32
--grad-accum-dtype fp8 --opt-level O1 --grad-format bf16
--tp-saved-input gathered
--train-samples 80
--rampup-batch-size 2 2 10 --global-batch-size 8
--lr-decay-samples 4
--lr-warmup-fraction 0.1 --lr-warmup-iters 1
--lr-warmup-init 0.1
--lr-decay-style WSD
--lr-wsd-decay-iters 4 --lr-decay-style WSD --lr-warmup-iters 2
--decoupled-min-lr 0.2 --decoupled-lr 0.1
--min-lr 0.01
--lr-warmup-iters 5
--lr-warmup-iters 3 --lr-decay-iters 3
--recompute-num-layers 5 {FULL}
--train-samples 7 --train-iters --global-batch-size 8
--lr-warmup-iters 4 {SAMPLES}
--lr-warmup-samples 80 {SAMPLES}
--rampup-batch-size 2 2 {SAMPLES}
--rampup-batch-size 8 2 9 {SAMPLES}
--rampup-batch-size 2 4 9 {SAMPLES}
--rampup-batch-size 5 1 9 {SAMPLES}
--rampup-batch-size 2 2 9 --train-iters --train-samples 2000000 --global-batch-size 800002
--data-path corpse --dry-run
--data-path
--split most,rest
--split 1,1,1,1
--split 2,-1
--split 0,1
--data-path 0.5 corpus corpus
--data-path 0.5 corpus 0 corpus
--data-path half
--tokenizer-type GPT2BPETokenizer --vocab-file v
--tokenizer-model gone.json --tokenizer-type HuggingFaceTokenizer
--vocab-file v
--vocab-size 1
--load gone
--load folder
--loss-spike-threshold 1
--profile-step-start 5 --profile --profile-step-end 5
--profile-ranks 1 --profile
--wandb-project p --wandb-exp-name e
--non-persistent-global-ckpt-dir ./new --save new --non-persistent-save-interval 2
--save corpus.bin/a/b
--metrics-file folder
--metrics-file corpus.bin/m
--fp8-gain-cache folder --opt-level O2
--finetune
--ckpt-step 0
--non-persistent-global-ckpt-dir fast --save new
--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler
--override-data
--loss-spike-window 9
--loss-spike-action rollback --loss-spike-threshold 2 --save folder
--device-memory-gib 40
--wandb-exp-name e
--use-pytorch-profiler --profile
--mask-prob 0.2
--mock-data
--train-data-path corpus
--reset-attention-mask --attention-backend flash
--reset-position-ids
--qk-layernorm-scope projection
--rope-scaling-factor 4
--swiglu --squared-relu
--num-layers-per-virtual-pipeline-stage 2
--cp-wire bf16
--moe-router-topk 4
--moe-router-num-groups 4 {MOE}
--moe-router-enable-expert-bias {MOE}
--num-experts 8 --disable-bias-linear
--lr-wsd-decay-iters 2
--recompute-modules mlp
--recompute-granularity full
--deterministic --attention-backend cudnn
--bf16-linears linear_qkv
--fp8-margin 0 --fp16
--fp8-guard-underflow 0.25 --opt-level O2
--smooth-swiglu --opt-level O2
--attention-precision fp8 --opt-level O2 --kv-channels 16 --attention-dropout 0.1
--loss-scale 8
--hysteresis 3 --fp16 --loss-scale 8
--qk-layernorm --precision te-bf16
""",
    2: f"""
--tensor-model-parallel-size 4
--global-batch-size 10
--global-batch-size 6 {PP} --num-layers-per-virtual-pipeline-stage 1
--recompute-num-layers 2 {PP} --num-layers-per-virtual-pipeline-stage 1 {FULL}
--rampup-batch-size 2 2 9 {SAMPLES} {PP} --num-layers-per-virtual-pipeline-stage 1
--qk-layernorm-scope projection --qk-layernorm {TP}
--num-attention-heads 25 {TP} --hidden-size 1600
--ffn-hidden-size 99 {TP}
--num-query-groups 1 {TP} --group-query-attention
--seq-length 31 {TP} --sequence-parallel
--num-layers-per-virtual-pipeline-stage 4 {PP} --num-layers 12
--num-layers-per-virtual-pipeline-stage 2 {PP}
--seq-length 30 {CP}
--reset-attention-mask {CP}
--cp-comm-type a2a {CP} --num-attention-heads 4 --group-query-attention --num-query-groups 1
--tensor-model-parallel-size 2 {MOE}
--sequence-parallel {MOE} --opt-level O3 {WHOLE_EXPERTS}
--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 {MOE} {EP}
--moe-wire fp8-sums {MOE} {EP} --opt-level O0
--tp-wire fp8 {TP} --opt-level O2
--tp-wire fp8 --opt-level O3 --fp8-recipe blockwise {TP}
--grad-accum-on owner --opt-level O2 --grad-exchange nccl
--as-published fp8-lm --grad-exchange nccl --mu-rule paper --master-rounding stochastic
--grad-exchange nccl
--grad-exchange nccl --opt-level O2 --grad-format fp32
--grad-exchange nccl --precision coat
--grad-scaling auto --opt-level O2
--mu-rule halve --opt-level O2
--mu-rule paper --opt-level O2 --grad-exchange nccl --grad-scaling pre
""",
    3: f"""
--num-attention-heads | --tensor-model-parallel-size 3
--hidden-size 64 --tensor-model-parallel-size 3 --num-attention-heads 6
--num-layers 10 --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2
--num-experts | {MOE} --expert-model-parallel-size 3
""",
}


def settings(flags: str) -> Config:
    """Return the configuration of `flags`; `--train-iters` without a value means that it is absent."""
    good = refusals.GOOD.replace("--train-iters 5", "") if "--train-iters --" in flags else refusals.GOOD
    return parse_args(shlex.split(f"{good} {flags.replace('--train-iters --', '--')}"))


@pytest.mark.promise("Starting and ending", "Impossible sizes and numbers are refused with their legal range.")
@pytest.mark.parametrize("processes", REFUSED)
def test_a_refusal_names_the_flag(processes: int):
    missed = []
    for line in REFUSED[processes].strip().splitlines():
        culprit, _, flags = line.partition(" | ") if " | " in line else (line.split()[0], "", line)
        try:
            check(settings(flags), processes)
            missed.append(f"{line}: accepted")
        except ValueError as error:
            missed += [] if culprit in str(error) else [f"{line}: {error}"]
    assert missed == []


def test_every_rule_has_a_refusal():
    """Each function of `RULES` yields something for one of the lines above."""
    fired: set[Any] = set()
    for processes, lines in REFUSED.items():
        for line in lines.strip().splitlines():
            made = settings(line.rpartition(" | ")[2])
            for rule in RULES.keys() - fired:
                try:
                    fired |= {rule} if list(rule(made, processes)) else set()
                except (KeyError, ValueError, ZeroDivisionError):  # values that `check` would have refused before it
                    continue
    assert fired == RULES.keys()
    sections = {field.name for field in dataclasses.fields(Config)}
    assert all(names and set(names) <= sections for names in RULES.values())


def meeting(condition: Condition, config: Config) -> Config:
    """Return the configuration with a value that meets a condition of `rules.toml`."""
    if condition.text in PRECISIONS:
        name = {"--fp16": "fp16-amp", "--precision te-*": "te-bf16"}.get(condition.text, "O2")
        return dataclasses.replace(config, precision=dataclasses.replace(config.precision, precision=name))
    section = getattr(config, condition.section)
    field = next(f for f in dataclasses.fields(section) if f.name == condition.name)
    hint, words = str(get_type_hints(type(section))[field.name]), condition.text.split()[1:]
    some = choices_of(field) or ("folder",)
    value: Any = words[0] if words and words[0] in some else next(one for one in some if one != field.default)
    if "bool" in hint:
        value = not field.default
    elif "int" in hint:
        value = (field.default if isinstance(field.default, int) else 1) + 1
    elif "float" in hint:
        value = (field.default or 1.0) / 2
    if "tuple" in hint:
        value = (words[0],) if words and words[0] in some else (value,)
    changed = dataclasses.replace(section, **{field.name: value})
    return dataclasses.replace(config, **{condition.section: changed})


ROWS = [rule for rule in rows() if rule.given.name != "moe_router_dtype"]  # it has one value


def fires_and_is_fixed(rule: RuleRow) -> bool:
    broken = meeting(rule.given, config())
    if rule.excluded:
        broken = meeting(rule.other, broken)
    elif rule.other.holds(broken):  # the needed value is the default
        section = getattr(broken, rule.other.section)
        field = next(f for f in dataclasses.fields(section) if f.name == rule.other.name)
        other = next(one for one in choices_of(field) or () if one != field.default)
        broken = dataclasses.replace(broken, **{rule.other.section: dataclasses.replace(section, **{field.name: other})})
    problem = rule.problem(broken) or ""
    named = problem.startswith(rule.given.text.split()[0]) and rule.other.text.split()[0] in problem and rule.why in problem
    can_be_fixed = not rule.excluded and rule.other.holds(meeting(rule.other, broken))
    fixed = not can_be_fixed or rule.problem(meeting(rule.other, broken)) is None
    return named and problem in conflicts(broken) and fixed and rule.problem(config()) is None


def test_every_rule_of_the_table_fires_and_is_fixed():
    assert [f"{rule.given.text}, {rule.other.text}" for rule in ROWS if not fires_and_is_fixed(rule)] == []


LEGAL = [
    ("", 3),
    ("--fp16 --initial-loss-scale 4294967296 --min-loss-scale 0.5 --loss-scale-window 1000 --hysteresis 2", 2),
    ("--precision fp16-amp --fp16 --loss-scale 8", 1),
    ("--opt-level O2 --fp8-amax-history-len 4 --fp8-amax-compute-algo most_recent --fp8-margin 1", 2),
    ("--precision coat --fp8-recipe delayed --fp8-amax-history-len 4", 2),
    ("--optimizer-state coat --exp-avg-sq-format coat-e5m2", 1),
    ("--opt-level O2 --master-format bf16 --grad-format fp32 --exp-avg-sq-format fp8-e5m2", 2),
    ("--opt-level O3", 4),
    ("--use-distributed-optimizer --no-overlap-grad-reduce --no-overlap-param-gather --grad-accum-dtype fp32", 2),
    ("--opt-level O1 --grad-exchange nccl --grad-scaling auto --mu-rule paper", 1),
    ("--opt-level O2 --grad-exchange fp32-sum --grad-accum-dtype fp8-sr --ddp-bucket-size 1 --global-batch-size 64", 2),
    ("--precision fp32 --global-batch-size 12", 3),
    ("--hidden-size 66 --kv-channels 16", 1),
    ("--position-embedding-type learned_absolute --max-position-embeddings 64 --reset-position-ids", 1),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1),
    ("--recompute-granularity selective --recompute-modules core_attn mlp", 1),
    ("--data-path 0.3 corpus 0.7 corpus --split 1", 1),
    ("--data-path --train-data-path corpus --valid-data-path corpus", 1),
    ("--save new/run --async-save --keep-last 1 --load new/run --ckpt-step 0", 1),
    ("--save new/run --save-interval 2 --loss-spike-threshold 1.5 --loss-spike-window 9 --loss-spike-action rollback", 1),
    ("--opt-level O3 --tensor-model-parallel-size 2 --sequence-parallel --tp-wire fp8 --tp-saved-input gathered", 4),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4", 2),
    (f"{CP} {TP} --sequence-parallel --cp-comm-type a2a --num-attention-heads 4 --reset-attention-mask", 4),
    (f"{CP} --cp-comm-type a2a --opt-level O2 --attention-precision fp8 --cp-wire fp8 --kv-channels 16", 2),
    (f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 1", 1),
    (f"{GROUPS} --moe-router-group-topk 2 --moe-router-topk 4 --moe-layer-freq ([0]*1+[1]*3)", 1),
    (f"{MOE} {WHOLE_EXPERTS} --sequence-parallel", 2),
    (f"{MOE} {EP} --opt-level O3 --moe-wire bf16 {PP}", 4),
    (f"{MOE} {EP} --opt-level O2 {WHOLE_EXPERTS} --sequence-parallel", 2),
]


def test_legal_settings_pass():
    for flags, processes in LEGAL:
        check(config(flags), processes)


def test_a_dry_run_needs_no_data_and_no_tokenizer():
    check(parse_args(shlex.split("--preset 175b --dry-run --device-memory-gib 80")), 128)


def test_all_problems_are_reported_at_once_even_beside_values_out_of_range():
    with pytest.raises(ValueError, match="3 settings") as caught:
        check(config("--num-attention-heads 0 --lr-warmup-iters 9 --opt-level O2 --bf16"), 1)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["--num-attention-heads", "--opt-level", "--lr-warmup-iters"]


def test_settings_that_did_not_come_from_flags_are_validated_too():
    good = config()
    for section, name, value in (("precision", "opt_level", "O4"), ("optimizer", "clip_grad", math.inf), ("data", "tokenizer_type", None)):
        odd = dataclasses.replace(good, **{section: dataclasses.replace(getattr(good, section), **{name: value})})
        with pytest.raises(ValueError, match=flag(name)):
            check(odd, 1)


def test_a_checkpoint_folder_is_recognized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / LATEST_CHECKPOINT_FILE).write_text("10")
    check(config(f"--load {folder} --finetune --no-load-rng"), 1)


def test_folders_without_permission_are_refused(monkeypatch):
    # By hand, because root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="2 settings") as caught:
        check(config("--save folder/new --metrics-file corpus.bin"), 1)
    assert "--save folder/new" in str(caught.value)
    assert "--metrics-file corpus.bin" in str(caught.value)


@pytest.mark.promise("Starting and ending", "A path that is not UTF-8 is refused.")
def test_a_path_that_is_not_utf_8_is_refused():
    with pytest.raises(ValueError, match=r"--save 'new/\\udcff'"):
        check(parse_args([*shlex.split(refusals.GOOD), "--save", os.fsdecode(b"new/\xff")]), 1)


def test_a_pipe_takes_no_lines_and_a_device_is_no_cache(tmp_path_factory):
    pipe = tmp_path_factory.mktemp("pipe") / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="2 settings") as caught:
        check(config(f"--metrics-file {pipe} --opt-level O2 --fp8-gain-cache /dev/null"), 1)
    assert f"--metrics-file {pipe}" in str(caught.value)
    assert "--fp8-gain-cache /dev/null" in str(caught.value)
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


def test_a_registered_exchange_has_its_own_scalings(monkeypatch):
    monkeypatch.setattr(exchange, "_EXCHANGES", dict(exchange._EXCHANGES))
    exchange.register(exchange.Exchange(name="mine", wire=exchange.NCCLWire, sums_in_fp32=False, scalings=("post", "pre")))
    check(config("--opt-level O2 --grad-exchange mine --grad-scaling pre"), 2)
    for flags in ("--grad-scaling auto --grad-exchange mine", "--mu-rule halve --grad-exchange mine", "--mu-rule halve"):
        with pytest.raises(ValueError, match=flags.split()[0]):
            check(config(f"--opt-level O2 {flags}"), 2)


def test_a_registered_recipe_with_an_fp8_wire_accepts_the_flags_of_the_wire(monkeypatch):
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    recipe.register(dataclasses.replace(recipe.O3, name="mine"))
    recipe.register(dataclasses.replace(recipe.O3, name="mine-bf16-wire", fp8_wire=False))
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --tp-wire fp8 --tp-saved-input gathered"
    check(config(f"--precision mine {flags}"), 2)
    assert config("--precision mine").shards_optimizer
    with pytest.raises(ValueError, match="--tp-wire"):
        check(config(f"--precision mine-bf16-wire {flags}"), 2)
