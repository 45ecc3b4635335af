"""Public launch scripts of Megatron-LM start here: what is built runs, the rest is refused by name in one message."""

import math
import re
import tomllib
from pathlib import Path

import pytest

from helpers import tiny
from megatron.lm import pretrain
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "helpers" / "megatron_scripts.toml").read_text(encoding="utf-8"))
DENSE = ("gpt3-175b", "bert-340m", "llama3-8b-fp8", "llama3.1-8b", "qwen3-8b")
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b")
# Scripts of other models, and the flags that are refused.
OTHERS = {
    "t5-220m": "--decoder-num-layers --decoder-seq-length --vocab-extra-ids --tokenizer-type",
    "llama3.1-8b-rl": "--grpo-group-size --inference-max-seq-length --pretrained-checkpoint --rl-use-sequence-packing",
    "gpt-oss-20b": "--padded-vocab-size --quick-geglu --glu-linear-offset --softmax-type --window-attn-skip-freq "
    "--activation-func-clamp-value --window-size",
    "deepseek-v2-lite": "--multi-latent-attention --kv-lora-rank --v-head-dim --qk-head-dim --qk-pos-emb-head-dim --rotary-scaling-factor "
    "--mscale --mscale-all-dim",
    "mamba-8b": "--hybrid-layer-pattern --spec",
}
PROCESSES = {"gpt3-175b": 1024, "bert-340m": 1024, "llama3-8b-fp8": 8, "llama3.1-8b": 8, "qwen3-8b": 8}
PROCESSES |= {"mixtral-8x7b": 32, "qwen3-30b-a3b": 32}
TOY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --seq-length 32 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--expert-model-parallel-size 1 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --min-lr 1e-5 --attention-backend auto "
)
ITERATIONS = "--train-iters 3 --lr-decay-iters 3"
SAMPLES = "--train-samples 12 --lr-decay-samples 12 --lr-warmup-samples 4"
RESUMES = {"--no-load-optim", "--no-load-rng", "--wandb-project", "--wandb-exp-name", "--tokenizer-model"}
OF_FILES = {"--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--vocab-size", "--save", "--load", "--save-interval"}


def without(line: str, flags: set[str]) -> str:
    """The line without some flags and their values."""
    return " ".join(part for part in re.split(r" (?=--)", line.strip()) if part.split()[0] not in flags)


def objective(name: str) -> str:
    """Return the flag for the objective, which Megatron-LM's scripts choose by their entry point."""
    return "--objective masked-lm " if name.startswith("bert") else ""


def toy(name: str) -> str:
    """Return the flags of a dense script at toy size: three iterations, no files."""
    left = OF_FILES | {"--tensorboard-dir", "--data-cache-path"}
    if name == "mixtral-8x7b":  # it resumes, warms up for 500 iterations and logs to a service
        left |= RESUMES | {"--lr-warmup-iters"}
    line = without(SCRIPTS[name], left)
    if "--rampup-batch-size" in line:  # Megatron-LM refuses a ramp beside --train-iters too
        line = f"{without(line, {'--train-iters', '--lr-decay-iters', '--rampup-batch-size'})} --train-samples 8 --rampup-batch-size 2 2 3"
    length = SAMPLES if "--lr-decay-samples" in line else "" if "--train-samples" in line else ITERATIONS
    if "--profile" in line.split():  # there is no GPU for nsys; an earlier profile, since there are three iterations
        line = f"{without(line, {'--profile-step-start', '--profile-step-end'})} --profile-step-start 1 --profile-step-end 2 "
        line += "--use-pytorch-profiler --tensorboard-dir profile"
    small = "--num-experts 16 --moe-ffn-hidden-size 32 " if "--moe-ffn-hidden-size" in line else ""  # of 128, a step took two seconds
    return f"{line} {objective(name)}{TOY}{small} {length} --fp8-min-gain 0 --eval-iters 1 --split 80,15,5"


def whole(name: str, prefix: Path) -> str:
    """Return the flags of a script at its own size, with data and a tokenizer that exist; a batch-size ramp loses --train-iters."""
    resumes = RESUMES if name == "mixtral-8x7b" else set()
    line = without(SCRIPTS[name], OF_FILES | {"--tensorboard-dir", "--data-cache-path"} | resumes)
    if "--rampup-batch-size" in line:
        line = f"{without(line, {'--train-iters', '--lr-decay-iters'})} --train-samples 768000000"
    if not {"--train-iters", "--train-samples"} & set(line.split()):
        line += " --train-iters 10000 --lr 3e-4"
    if name in {"llama3.1-8b", "qwen3-8b"}:  # the launcher of these takes its grid from the environment
        line += " --tensor-model-parallel-size 8"
    if name == "qwen3-30b-a3b":
        line += " --expert-model-parallel-size 8 --use-distributed-optimizer"
    if name in MIXTURES:  # our buffers have room for any load of the experts
        line += " --recompute-granularity selective --recompute-modules mlp"
    if name == "bert-340m":  # its 16 stages do not divide 24 layers, which Megatron-LM refuses too
        line += " --pipeline-model-parallel-size 8"
    data = "" if "--mock-data" in line else f"--data-path {prefix} "
    return f"{line} {objective(name)}{data}--tokenizer-type NullTokenizer --vocab-size 50257 --micro-batch-size 1 --dry-run"


def start(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], processes: int | None = None
) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of the command, run in this process; `processes` sets WORLD_SIZE for a dry run."""
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
    try:
        code = pretrain.main(line.split())
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_ramp_beside_iterations_is_refused_as_in_megatron_lm():
    line = without(SCRIPTS["gpt3-175b"], OF_FILES | {"--rampup-batch-size", "--tensorboard-dir"})
    with pytest.raises(ValueError, match=r"--train-iters 3 counts iterations: give --train-samples 8 for as many iterations"):
        check(parse_args(f"{line} {TOY} {ITERATIONS} --rampup-batch-size 2 2 3 --dry-run".split()), 1)


@pytest.mark.promise(
    "Megatron flags", "Launch scripts of GPTs, mixtures of experts and BERT start: a dry run at their size, and training at toy size."
)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_a_script_starts_at_its_own_size(name: str, prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code, out, error = start(whole(name, prefix), monkeypatch, capsys, PROCESSES[name])
    assert (code, error) == (0, ""), error
    assert "nothing was started" in out


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_a_script_trains_three_steps_at_toy_size(
    name: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data = "" if "--mock-data" in SCRIPTS[name] else f"--data-path {prefix}"
    outputs = f"{data} --tokenizer-type NullTokenizer --vocab-size 60 --log-interval 1 --metrics-file {tmp_path}/metrics.jsonl"
    monkeypatch.chdir(tmp_path)
    code, _, error = start(f"{toy(name)} {outputs}", monkeypatch, capsys)
    assert (code, error) == (0, ""), error
    losses = tiny.losses(tiny.read(tmp_path / "metrics.jsonl"))
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    assert len(list(tmp_path.glob("profile/rank-0.iterations-2-2.pt.trace.json.gz"))) == ("--profile" in SCRIPTS[name].split())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", OTHERS)
def test_a_script_of_another_model_is_refused_by_name_in_one_message(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, out, error = start(f"{SCRIPTS[name]} --dry-run", monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert "unknown flag" not in error
    assert sorted(re.findall(r"^- (--[a-z0-9-]+)", error, re.MULTILINE)) == sorted(OTHERS[name].split())


def test_gpt_oss_without_these_flags_is_refused_for_its_experts(prefix: Path):
    """Its experts have biases, and GELU once --quick-geglu is dropped."""
    line = without(SCRIPTS["gpt-oss-20b"], {*OTHERS["gpt-oss-20b"].split(), "--save-interval"})
    line += f" --tokenizer-type NullTokenizer --vocab-size 60 --data-path {prefix} --micro-batch-size 1 --train-iters 9 --lr 1e-4"
    with pytest.raises(ValueError, match=r"(?s)--swiglu.*--disable-bias-linear"):
        check(parse_args(line.split()), 8)
