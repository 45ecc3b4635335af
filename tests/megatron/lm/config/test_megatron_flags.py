"""Flags of Megatron-LM: every one has a row, and a command line becomes one of the trainer's own flags or is refused by name."""

import argparse
import gc
import importlib
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers import refusals, tiny
from megatron.lm.config.cli import _options, _parser, parse, parse_args, to_argv
from megatron.lm.config.megatron_flags.apply import apply, given_by
from megatron.lm.config.megatron_flags.table import ACCEPTED, DROPPED, REFUSED, TRANSLATED, FlagRow, find, rows, rows_of, spelled
from megatron.lm.config.rules.check import check
from megatron.lm.run import trainer

HELPERS = Path(__file__).parents[3] / "helpers"
NAMES = (HELPERS / "megatron_flag_names.txt").read_text().split()
LINES = tomllib.loads((HELPERS / "megatron_lines.toml").read_text(encoding="utf-8"))
BY_LINE = {line: treatment for treatment, lines in LINES["treatment"].items() for line in lines.splitlines()}
KNOWN = _options(_parser({}))
AWARE = "--fp8-format hybrid --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16"


def applied(line: str, preset=None):
    return apply(shlex.split(line), KNOWN, preset or {})


def treatment(line: str) -> str:
    """The strongest treatment of a line's flags."""
    try:
        result = applied(line)
    except ValueError as error:
        return "unknown" if "unknown flag" in str(error) else REFUSED
    if any(" dropped: " in told for told in result.lines):
        return DROPPED
    return TRANSLATED if result.lines else ACCEPTED


@pytest.mark.promise(
    "Megatron flags", "Each of 235 flag lines of public Megatron-LM scripts is accepted, translated, dropped or refused as listed."
)
def test_each_line_of_public_scripts_is_treated_as_listed():
    assert len(BY_LINE) == 235
    assert {line: treatment(line) for line in BY_LINE} == BY_LINE


def test_every_flag_of_the_installed_megatron_lm_has_a_row():
    """megatron-core's wheel has Megatron-LM's parser from 0.17 on."""
    pytest.importorskip("megatron.training", reason="the installed megatron-core is older")
    add = importlib.import_module("megatron.training.arguments").add_megatron_arguments
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add(parser)
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    assert len(names) > 800
    assert [name for name in names if not rows_of(spelled(name))] == []


def test_every_flag_of_megatron_lm_has_a_row_and_every_row_a_reason():
    assert len(NAMES) > 600
    assert [name for name in NAMES if not rows_of(spelled(name))] == []
    assert [row.line for row in rows() if row.treatment in (DROPPED, REFUSED) and (not row.why or "|" in row.why)] == []
    listed = [row.line for row in rows() if not row.conditional]
    assert len(listed) == len(set(listed))


def test_the_table_names_flags_of_the_trainer():
    accepted = [row.flag for row in rows() if row.treatment == ACCEPTED]
    becomes = [word for row in rows() for word in row.becomes if word.startswith("--")]
    assert [flag for flag in (*accepted, *becomes) if flag not in KNOWN] == []
    always = [row for row in rows() if row.value is None and not row.conditional and row.treatment in (DROPPED, REFUSED)]
    assert [row.line for row in always if row.flag in KNOWN] == []


@pytest.mark.parametrize(
    ("line", "flag", "takes", "value"),
    [
        ("--use-flash-attn", "--use-flash-attn", 0, None),
        ("--rampup-batch-size N N N", "--rampup-batch-size", 3, None),
        ("--spec TEXT...", "--spec", None, None),
        ("--context-parallel-size 1", "--context-parallel-size", 1, "1"),
        ("--moe-*", "--moe-*", None, None),
        ("--override-opt_param-scheduler", "--override-opt-param-scheduler", 0, None),
    ],
)
def test_a_row_is_written_as_in_a_script(line, flag, takes, value):
    row = FlagRow(subject="model", line=line, treatment=ACCEPTED)
    assert (row.flag, row.takes, row.value) == (flag, takes, value)


def test_a_family_serves_the_flags_that_have_no_row_of_their_own():
    given = given_by([])
    assert find("--moe-something-new", [], given).treatment == REFUSED
    assert find("--hybrid-attention-ratio", ["0.0"], given).treatment == DROPPED
    assert find("--hybrid-attention-ratio", ["0.5"], given).treatment == REFUSED
    assert find("--no-such-flag", [], given) is None


def test_what_a_line_becomes():
    rows = [row.partition(" -> ")[::2] for row in LINES["lines"]["becomes"].splitlines()]
    assert [(line, " ".join(applied(line).argv)) for line, _ in rows] == rows


def test_a_preset_counts_as_given():
    preset = {"tensor_model_parallel_size": 8, "group_query_attention": True}
    line = "--sequence-parallel --num-query-groups 4"
    assert " ".join(applied(line, preset).argv) == line


def test_the_log_names_what_is_dropped_or_translated():
    lines = applied("--use-flash-attn --no-rope-fusion --no-bias-gelu-fusion --attention-backend fused").lines
    assert lines[0] == "--attention-backend fused means --attention-backend cudnn here"
    assert [line.partition(":")[0] for line in lines[1:]] == ["--use-flash-attn dropped", "--no-rope-fusion, --no-bias-gelu-fusion dropped"]


@pytest.mark.promise("Megatron flags", "All unknown and refused flags of a command line are named in one message.")
def test_all_unknown_and_refused_flags_are_named_in_one_message():
    line = (
        "--moe-expert-capacity-factor 8 --use-flash-attn --trian-iters 4 --moe-input-jitter-eps 2 --spec a b --xyzzy 1 --timing-log-level"
    )
    with pytest.raises(ValueError, match="6 flags") as refusal:
        applied(line)
    problems = str(refusal.value).split("\n- ")[1:]
    starts = ("--moe-expert-capacity-factor 8: ", "unknown flag --trian-iters (did you mean --train-iters?)", "--moe-input-jitter-eps 2: ")
    starts = (*starts, "--spec a b: ", "unknown flag --xyzzy", "--timing-log-level is missing a value")
    assert all(problem.startswith(words) for problem, words in zip(problems, starts, strict=True))


def test_a_refusal_names_the_flag():
    for line in LINES["lines"]["named"].splitlines():
        with pytest.raises(ValueError, match=line.partition(" ")[0]):
            applied(line)


TRAINED = {
    "hybrid": "--fp8-format hybrid",
    "hybrid, gathered": "--fp8-format hybrid --fp8-param-gather",
    "e4m3": "--fp8-format e4m3 --fp8-recipe blockwise",
    "precision-aware": AWARE,
    "moments alone": "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
}
STATES = ("master_format", "grad_format", "exp_avg_format", "exp_avg_sq_format")


@pytest.mark.promise("Megatron flags", "`--bf16 --fp8-format hybrid` trains in FP8 GEMMs with FP32 masters, gradients and moments.")
@pytest.mark.parametrize(
    "name", [name if name in ("hybrid", "precision-aware") else pytest.param(name, marks=pytest.mark.nightly(2)) for name in TRAINED]
)
def test_what_the_flags_become_trains(prefix: Path, name: str):
    made = refusals.config(f"--bf16 {TRAINED[name]} --fp8-min-gain 0 --data-path {prefix} --vocab-size 60 --train-iters 3")
    check(made, 1)
    recipe = made.precision.recipe
    assert (recipe.gemm is not None) == ("fp8-format" in TRAINED[name])
    if name == "hybrid":
        assert {str(getattr(recipe.states, key)) for key in ("master", "grad", "m", "v")} == {"fp32"}
    settings = {key: getattr(made.precision, key) for key in ("opt_level", "bf16", "fp8_recipe", *STATES)}
    losses = tiny.losses(tiny.run(tiny.config(prefix, train_iters=12, **settings)))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_steps_leave_no_reference_cycles_so_that_manual_gc_has_nothing_to_do(prefix: Path, monkeypatch: pytest.MonkeyPatch, level: str):
    collected: list[int] = []
    train_step = trainer.train_step

    def counted(*args: Any) -> Any:
        collected.append(gc.collect())
        gc.disable()  # what a step leaves is counted before the next one
        return train_step(*args)

    monkeypatch.setattr(trainer, "train_step", counted)
    try:
        tiny.run(tiny.config(prefix, opt_level=level, train_iters=8))
    finally:
        gc.enable()
    assert len(collected) == 8
    assert collected[3:] == [0] * 5  # the first steps compile and allocate


REQUIRED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3 "


def settings(flags: str):
    return parse_args(shlex.split(REQUIRED + flags))


def defaults_line(flags: str) -> str:
    return (parse(shlex.split(REQUIRED + flags)).lines or ("",))[-1]


@pytest.mark.parametrize(
    ("flags", "listed", "absent"),
    [
        ("", "--position-embedding-type learned_absolute -> rope", "loss-scale"),
        ("--hidden-dropout 0", "precision FP32 -> bf16", "--hidden-dropout"),
        ("--use-rotary-position-embeddings", "--attention-dropout", "--position-embedding-type"),
        ("--opt-level O2", "--fp8-amax-history-len 1 -> 16", " precision "),
        ("--opt-level O2 --fp8-recipe tensorwise", "--fp8-min-gain", "--fp8-amax-history-len"),
        ("--no-overlap-grad-reduce", "--overlap-param-gather", "--overlap-grad-reduce"),
        ("--preset llama3-8b --num_workers 1", "--overlap-grad-reduce", "--num-workers"),
        ("--fp16", "--initial-loss-scale 2^32 -> 2^16", " precision "),
        ("--fp16 --loss-scale 8", "--hidden-dropout", "--initial-loss-scale"),
        ("--tokenizer-type NullTokenizer --vocab-size 100", "NullTokenizer's end of document V -> V - 1", "loss-scale"),
    ],
)
def test_a_line_lists_the_defaults_that_differ(flags, listed, absent):
    line = defaults_line(flags)
    assert listed in line
    assert absent not in line


def test_megatron_defaults_apply_to_absent_flags():
    config = settings("--megatron-defaults --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 100")
    assert config.model.position_embedding_type == "learned_absolute"
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.0)
    assert config.precision.name == "fp32"
    assert config.model.vocab_size == 101  # the end of document is 100, as in Megatron-LM
    assert not config.communication.overlap_grad_reduce
    assert defaults_line("--megatron-defaults") == ""
    assert parse_args(to_argv(config)) == config
    fp16 = settings("--megatron-defaults --fp16").precision
    assert (fp16.initial_loss_scale, fp16.loss_scale_window) == (2.0**32, 1000)
    fp8 = settings("--megatron_defaults --opt-level O2").precision
    assert (fp8.fp8_amax_history_len, fp8.fp8_amax_compute_algo) == (1, "most_recent")
    assert settings("--megatron-defaults --preset llama3-8b").model.rotary_base == 5e5
