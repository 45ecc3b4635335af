"""--yaml-cfg: Megatron-LM's YAML of arguments as flags, at the top or in its sections, and what it refuses."""

import shlex
from pathlib import Path

import pytest
import yaml

from helpers import tiny
from megatron.lm.config.cli import known_flags, parse, parse_args
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.megatron_flags.yaml_file import FIELDS, OTHER_NAMES, words_of


@pytest.fixture(autouse=True)
def files() -> None:
    """Unlike its neighbours this file writes into its folder."""


NESTED = """
language_model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 2
  num_query_groups: null
  add_bias_linear: False
  activation_func: swiglu
  layernorm_epsilon: 1.e-6
  masked_softmax_fusion: True
  timers: null
model_parallel:
  tensor_model_parallel_size: 1
  sequence_parallel: True
  bf16: True
  batch_p2p_comm: True
micro-batch-size: 2
global_batch_size: 4
seq_length: 16
lr: 5.e-3
overlap_grad_reduce: False
log_throughput: True
untie_embeddings_and_output_weights: True
tokenizer_type: NullTokenizer
vocab_size: 60
wandb_project: ''
"""
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --disable-bias-linear --swiglu --norm-epsilon 1e-6 --bf16 "
    "--micro-batch-size 2 --global-batch-size 4 --seq-length 16 --lr 5e-3 --no-overlap-grad-reduce --untie-embeddings-and-output-weights "
    "--tokenizer-type NullTokenizer --vocab-size 60"
)


def words(folder: Path, text: str) -> list[str]:
    (folder / "a.yaml").write_text(text)
    return words_of(str(folder / "a.yaml"), known_flags())


def test_a_nested_file_is_the_flags(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(NESTED)
    parsed = parse(["--yaml_cfg", str(tmp_path / "a.yaml"), "--data-path", "x", "--train-iters", "3"])
    assert parsed.config == parse_args([*shlex.split(FLAGS), "--data-path", "x", "--train-iters", "3"])
    assert any(line.startswith("--sequence-parallel dropped: ") for line in parsed.lines)
    assert any(line.startswith("--log-throughput dropped: ") for line in parsed.lines)


def test_flat_keys_are_the_same(tmp_path: Path):
    flat = "\n".join(line.strip() for line in NESTED.splitlines() if line.strip() not in ("language_model:", "model_parallel:"))
    assert words(tmp_path, flat) == words(tmp_path, NESTED)


def test_the_command_line_replaces_the_file_and_says_so(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(NESTED)
    parsed = parse(
        [f"--yaml-cfg={tmp_path / 'a.yaml'}", "--data-path", "x", "--train-iters", "3", "--lr", "1e-4", "--micro_batch_size", "1"]
    )
    assert (parsed.config.optimizer.lr, parsed.config.training.micro_batch_size) == (1e-4, 1)
    assert parsed.lines[0] == f"--yaml-cfg {tmp_path / 'a.yaml'}: the command line replaces --micro-batch-size, --lr"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data_path: a", ["--data-path", "a"]),
        ("data_path: 0.3 a 0.7 b", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("data_path: [0.3, a, 0.7, b]", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("rampup_batch_size: [2, 2, 8]", ["--rampup-batch-size", "2", "2", "8"]),
        ("split: '99,1,0'", ["--split", "99,1,0"]),
        ("lr: 1e-4", ["--lr", "1e-4"]),
        ("data_path: ${FOLDER}/a", ["--data-path", "there/a"]),
        ("mock_data: False", []),
        ("language_model: {moe_router_topk: 2}", ["--moe-router-topk", "2"]),
        ("language_model: {moe_router_topk: 4}", ["--moe-router-topk", "4"]),
        ("recompute_granularity: null", []),
        ("apply_rope_fusion: False", ["--no-rope-fusion"]),
        ("language_model: null\nseed: 3", ["--seed", "3"]),
    ],
)
def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]):
    monkeypatch.setenv("FOLDER", "there")
    assert words(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "micro_batch_siz: 2\nlanguage_model:\n  hiden_size: 3\nfoo: 1",
            r"3 keys are refused.*micro_batch_siz \(did you mean micro_batch_size.*hiden_size \(did you mean hidden_size.*unknown key foo",
        ),
        ("lr: 1\nlr: 2", "the keys lr are given twice"),
        ("- a", "is not a mapping of arguments"),
        ("", "is not a mapping of arguments"),
        ("a: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("data: {path: a}", "unknown key data"),
        ("data_path: {a: 1}", "data_path is nested: give one value or a list"),
        ("rotary_interleaved: True", "rotary_interleaved: True has no flag here: drop it"),
        ("activation_func: tanh", "activation_func: 'tanh' is unknown: choose swiglu, squaredrelu or gelu"),
        ("data_path: ${NOT_THERE}/a", "the environment has no NOT_THERE: set it, or write the value"),
    ],
)
def test_what_is_no_file_of_arguments_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ValueError, match=rf"(?s)^--yaml-cfg .*{message}"):
        words(tmp_path, text)


def test_a_missing_file_and_refused_flags_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        parse(["--yaml-cfg", str(tmp_path / "none.yaml")])
    assert "none.yaml cannot be read" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("num_experts: 8\nmultimodal: True\n")
    with pytest.raises(SystemExit, match="2"):
        parse(["--yaml-cfg", str(tmp_path / "a.yaml")])
    assert "unknown key multimodal" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("moe_expert_capacity_factor: 8\n")
    with pytest.raises(SystemExit, match="2"):
        parse(["--yaml-cfg", str(tmp_path / "a.yaml"), "--kv-lora-rank", "5"])
    said = capsys.readouterr().err
    assert "2 flags are refused" in said
    assert "--moe-expert-capacity-factor 8" in said


def test_the_names_of_fields_are_no_flags_and_become_known_ones():
    known = known_flags()
    for value in (False, True, "swiglu", 1):
        for name, words_for in OTHER_NAMES.items():
            found = words_for(value) or []
            try:
                apply(found, known)
            except ValueError as error:
                assert "unknown flag" not in str(error), name  # noqa: PT017
    assert not FIELDS.keys() & OTHER_NAMES.keys()


@pytest.mark.usefixtures("alone")
def test_a_run_of_a_file_trains_evaluates_saves_and_resumes_as_the_flags(prefix: Path, tmp_path: Path):
    def told(rows: list[dict]) -> list[tuple[str, int, float]]:
        return [(row["kind"], row["iteration"], row["loss"]) for row in rows if "loss" in row]

    more = {"data_path": str(prefix), "train_iters": 4, "lr_decay_iters": 4, "eval_interval": 2, "eval_iters": 1, "log_interval": 1}
    content = yaml.safe_load(NESTED) | more | {"split": "80,15,5", "log_params_norm": True}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content))
    rest = f"--data-path {prefix} --train-iters 4 --lr-decay-iters 4 --eval-interval 2 --eval-iters 1 --log-interval 1 --split 80,15,5"
    flags = told(tiny.command(tmp_path, *shlex.split(f"{FLAGS} {rest}")))
    file = ["--yaml-cfg", str(tmp_path / "a.yaml")]
    assert told(tiny.command(tmp_path, *file)) == flags
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    tiny.command(tmp_path, *file, *save, "--train-iters", "2")
    assert told(tiny.command(tmp_path, *file, *save)) == [row for row in flags if row[1] > 2]
