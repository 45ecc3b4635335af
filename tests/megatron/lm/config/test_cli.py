"""Flags to Config and back."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import pytest

from megatron.lm.config import flag
from megatron.lm.config.cli import config_from_dict, config_to_dict, parse_args, section_types, to_argv
from megatron.lm.config.presets import PRESETS
from megatron.lm.config.sections.precision import recipe_names
from msamp.numerics import recipe

REQUIRED = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3"
)
EVERYTHING = shlex.split(
    "--group-query-attention --num-query-groups 2 --kv-channels 16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --rotary-percent 0.5 --hidden-dropout 0.1 --attention-backend flash "
    "--opt-level O2 --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo most_recent --fp8-margin 2 "
    "--master-format fp8-e4m3 --exp-avg-sq-format fp8-e5m2 "
    "--use-distributed-optimizer --grad-exchange nccl --mu-rule paper --grad-accum-dtype fp8-sr --no-overlap-param-gather "
    "--ddp-bucket-size 4096 --tp-wire fp8 --tp-saved-input gathered --dry-run --device-memory-gib 79.5 "
    "--min-lr 1e-5 --lr-decay-style cosine --adam-eps 1e-10 --global-batch-size 8 --eval-iters 0 "
    "--data-path 0.3 a 0.7 b --split 98,2 --tokenizer-type NullTokenizer --vocab-size 100 --eod-mask-loss "
    "--save out --save-interval 3 --no-load-rng --metrics-file m.jsonl --peak-tflops 100.5 --distributed-backend gloo"
)


def usage_error(capsys, argv):
    with pytest.raises(SystemExit) as left:
        parse_args(argv)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_round_trips():
    for argv in (REQUIRED, REQUIRED + EVERYTHING, *(["--preset", name] for name in PRESETS)):
        config = parse_args(argv)
        assert parse_args(to_argv(config)) == config
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required", "--num-layers", "--seq-length"]),
        (["--opt-level", "O4"], ["--opt-level", "'O4'", "O0", "O1", "O2", "O3"]),
        (["--fp8-scaling", "current"], ["unknown flag --fp8-scaling"]),
        (["--preset", "6b"], ["--preset", "'6b'", "7b", "175b"]),
        (["--num-layers", "two"], ["--num-layers", "'two'", "int"]),
        (["--num-layer", "2"], ["unknown flag --num-layer", "did you mean --num-layers?"]),
        (["--max-lr=3"], ["unknown flag --max-lr (msamp pretrain --help lists the flags)"]),
        ([*REQUIRED, "stray"], ["unrecognized arguments: stray"]),
        (["--no-swiglu"], ["unknown flag --no-swiglu"]),
    ],
)
def test_usage_errors_name_the_value_and_the_remedy(capsys, argv, words):
    message = usage_error(capsys, argv)
    assert all(word in message for word in words), message
    assert "Traceback" not in message


def test_a_usage_error_and_good_flags_need_neither_torch_nor_megatron_core():
    program = (
        "import sys; from megatron.lm.config import cli; from megatron.lm.config.rules import check\n"
        f"cli.parse_args({[*REQUIRED, '--opt-level', 'O2']})\n"
        "try: cli.parse_args(['--opt-level', 'O4'])\n"
        "finally: print([m for m in sys.modules if m == 'torch' or m.startswith('megatron.core')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "[]\n"), "heavy imports make every usage error slow"


def test_help_lists_every_flag_and_every_name_that_can_be_registered():
    program = "import sys; sys.argv = ['x', '--help']\nfrom megatron.lm.config import cli\ncli.parse_args()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for cls in section_types().values():
        for name in (setting.name for setting in dataclasses.fields(cls)):
            assert re.search(rf"{flag(name)}[ ,\n]", done.stdout), name
    assert "--preset" in done.stdout
    assert f"--precision {{{','.join(recipe_names())}}}" in done.stdout
    assert f"--fp8-recipe {{{','.join(recipe.GEMMS)}}}" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, "'modle'.*did you mean model"),
        ({"optimizer": {"lr": 1.0, "beta": 1}}, "'beta'"),
        ({"optimizer": {}}, "'optimizer'.*lr"),
        ({"training": {"micro_batch_size": True, "train_iters": 1}}, "micro_batch_size is True"),
        ({"data": {"data_path": "a"}}, "data_path is 'a'"),
        ({"logging": {"log_interval": None}}, "log_interval is None"),
    ],
)
def test_a_damaged_dictionary_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(config_to_dict(parse_args(REQUIRED)) | change)


def test_whole_numbers_are_floats_too_and_left_out_settings_take_defaults():
    data = config_to_dict(parse_args(REQUIRED))
    data["optimizer"] = {"lr": 1}
    del data["logging"]
    config = config_from_dict(data)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.logging.log_interval == 100
