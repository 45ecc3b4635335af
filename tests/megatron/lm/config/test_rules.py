"""A configuration is validated before anything starts: every problem is reported at once, each with the flag that caused it."""

import dataclasses
import math
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
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

LINES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """The lines of a table of `rules.toml`, with the flags that its names stand for."""
    for name, flags in reversed(LINES["names"].items()):
        text = text.replace(f"{{{name}}}", flags)
    return text.splitlines()


REFUSED = {int(processes): lines(text) for processes, text in LINES["refused"].items()}


def settings(flags: str) -> Config:
    """Return the configuration of `flags`; `--train-iters` without a value means that it is absent."""
    good = refusals.GOOD.replace("--train-iters 5", "") if "--train-iters --" in flags else refusals.GOOD
    return parse_args(shlex.split(f"{good} {flags.replace('--train-iters --', '--')}"))


@pytest.mark.promise("Starting and ending", "Impossible sizes and numbers are refused with their legal range.")
@pytest.mark.parametrize("processes", REFUSED)
def test_a_refusal_names_the_flag(processes: int):
    missed = []
    for line in REFUSED[processes]:
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
    for processes, refused in REFUSED.items():
        for line in refused:
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


def test_legal_settings_pass():
    for line in lines(LINES["accepted"]["lines"]):
        processes, _, flags = line.partition(" ")
        check(config(flags), int(processes))


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


def test_lines_are_not_appended_to_other_files():
    Path("corpus.bin").write_bytes(b"\x01\x00")
    with pytest.raises(ValueError, match=r"--metrics-file corpus\.bin holds something other than lines of JSON"):
        check(config("--metrics-file corpus.bin"), 1)


def test_no_two_outputs_are_one_file():
    with pytest.raises(ValueError, match=r"--record-precision and --fp8-gain-cache name one file, \./a: give"):
        check(config("--metrics-file b --record-precision a --fp8-gain-cache ./a --opt-level O2"), 1)


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
