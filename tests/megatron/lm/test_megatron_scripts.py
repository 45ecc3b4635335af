"""Public launch scripts of Megatron-LM start here: what is built runs, the rest is refused by name in one message."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import tiny
from helpers.megatron_scripts import SCRIPTS
from megatron.lm import pretrain
from megatron.lm.config.cli import known_flags, parse_args
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.rules.check import check

# Dense GPTs and BERT: flags that may still be refused until their feature is built.
DENSE = {
    "gpt3-175b": set(),
    "bert-340m": set(),
    "llama3-8b-fp8": set(),
    "llama3.1-8b": set(),
    "qwen3-8b": set(),
}
# Mixtures of experts that train.
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b")
LATENT = "multi-latent attention is not supported: use multi-head or grouped-query attention (--group-query-attention)"
WINDOW = "sliding-window attention is not supported, every token attends to all before it: use Megatron-LM for this model"
SINKS = (
    "attention sinks and other additions to the softmax are not supported: give --softmax-type vanilla, or use Megatron-LM for this model"
)
CLAMPED = (
    "gated activations with an offset or a clamp (gpt-oss) are not supported: use Megatron-LM for this model, or --swiglu without them"
)
GPT_OR_BERT = "this trainer builds only GPT, and BERT as RoBERTa trains it (--objective masked-lm): use Megatron-LM for this model"
PAIRS = "BERT's sentence pairs are not supported: use HuggingFaceTokenizer with --objective masked-lm"
LAYERS = "the precision determines the layers here: write a recipe, or use Megatron-LM"
RLHF = "this command only pre-trains: use examples/rlhf for DPO and PPO"
# Other models: the lines of the refusal, each exactly.
OTHERS = {
    "t5-220m": {
        "--decoder-num-layers 12": GPT_OR_BERT,
        "--decoder-seq-length 128": "GPT has a single sequence length: give only --seq-length",
        "--vocab-extra-ids 100": GPT_OR_BERT,
        "--tokenizer-type BertWordPieceCase": PAIRS,
    },
    "llama3.1-8b-rl": {
        "--grpo-group-size 16": RLHF,
        "--inference-max-seq-length 4096": "this command only trains: export the checkpoint with `msamp convert to-hf`",
        "--pretrained-checkpoint RUN": "give the checkpoint with --load and --finetune",
        "--rl-use-sequence-packing": RLHF,
    },
    "gpt-oss-20b": {
        "--padded-vocab-size 201088": "the embedding's size follows from the tokenizer's vocabulary: give --make-vocab-size-divisible-by",
        "--quick-geglu": "this activation is not supported: use GELU, --swiglu or --squared-relu",
        "--glu-linear-offset 1.0": CLAMPED,
        "--softmax-type learnable": SINKS,
        "--window-attn-skip-freq 2": WINDOW,
        "--activation-func-clamp-value 7.0": CLAMPED,
        "--window-size 127,0": WINDOW,
    },
    "deepseek-v2-lite": {
        "--multi-latent-attention": LATENT,
        "--kv-lora-rank 512": LATENT,
        "--v-head-dim 128": LATENT,
        "--qk-head-dim 128": LATENT,
        "--qk-pos-emb-head-dim 64": LATENT,
        "--rotary-scaling-factor 40": LATENT,
        "--mscale 0.707": LATENT,
        "--mscale-all-dim 0.707": LATENT,
    },
    "mamba-8b": {
        "--hybrid-layer-pattern M-M*M-": "Mamba and linear attention are not supported: drop it, or use Megatron-LM",
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec": LAYERS,
    },
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


def refused(line: str) -> set[str]:
    """The flags that a start of the script names in its one message."""
    try:
        apply(line.split(), known_flags())
    except ValueError as error:
        assert "unknown flag" not in str(error)  # noqa: PT017
        return set(re.findall(r"(?:^|\n- )(--[a-z0-9-]+)", str(error)))
    return set()


def without(line: str, flags: set[str]) -> str:
    """The line without some flags and their values."""
    return " ".join(part for part in re.split(r" (?=--)", line.strip()) if part.split()[0] not in flags)


def test_there_are_twelve_scripts():
    assert {*DENSE, *MIXTURES, *OTHERS} == set(SCRIPTS)
    assert len(SCRIPTS) == 12


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_script_is_refused_for_nothing_but_what_is_not_built(name):
    assert refused(SCRIPTS[name]) <= DENSE[name]


def objective(name: str) -> str:
    """Return the flag for the objective, which Megatron-LM's scripts choose by their entry point."""
    return "--objective masked-lm " if name.startswith("bert") else ""


def toy(name: str) -> str:
    """Return the flags of a dense script at toy size: three iterations, no files."""
    left = OF_FILES | DENSE.get(name, set()) | {"--tensorboard-dir", "--data-cache-path"}
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
    code, out, error = start(without(whole(name, prefix), DENSE.get(name, set())), monkeypatch, capsys, PROCESSES[name])
    assert (code, error) == (0, ""), error
    assert "nothing was started" in out


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_a_script_trains_three_steps_at_toy_size(
    name: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data = "" if "--mock-data" in SCRIPTS[name] and "--mock-data" not in DENSE.get(name, set()) else f"--data-path {prefix}"
    outputs = f"{data} --tokenizer-type NullTokenizer --vocab-size 60 --log-interval 1 --metrics-file {tmp_path}/metrics.jsonl"
    monkeypatch.chdir(tmp_path)
    code, _, error = start(f"{toy(name)} {outputs}", monkeypatch, capsys)
    assert (code, error) == (0, ""), error
    losses = tiny.losses(tiny.read(tmp_path / "metrics.jsonl"))
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    assert len(list(tmp_path.glob("profile/rank-0.iterations-2-2.pt.trace.json.gz"))) == ("--profile" in SCRIPTS[name].split())


def lines_of(error: str) -> dict[str, str]:
    """Map each refused flag, with its value, to the reason; check that the message counts several and ends with a pointer to --help."""
    first, *lines = error.removesuffix(" (msamp pretrain --help lists the flags)\n").split("\n- ")
    if not lines:
        flag, reason = first.removeprefix("msamp pretrain: error: ").split(": ", 1)
        return {flag: reason}
    assert first == f"msamp pretrain: error: {len(lines)} flags are refused, nothing was started:"
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", OTHERS)
def test_a_script_of_another_model_is_refused_by_name_in_one_message(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, out, error = start(f"{SCRIPTS[name]} --dry-run", monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert lines_of(error) == OTHERS[name]


def test_gpt_oss_without_these_flags_is_refused_for_its_experts(prefix: Path):
    """Its experts have biases, and GELU once --quick-geglu is dropped."""
    line = without(SCRIPTS["gpt-oss-20b"], {flag.split()[0] for flag in OTHERS["gpt-oss-20b"]} | {"--save-interval"})
    line += f" --tokenizer-type NullTokenizer --vocab-size 60 --data-path {prefix} --micro-batch-size 1 --train-iters 9 --lr 1e-4"
    with pytest.raises(ValueError, match=r"(?s)--swiglu.*--disable-bias-linear"):
        check(parse_args(line.split()), 8)


@pytest.mark.nightly(90)
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_a_script_starts_as_a_process(name: str, prefix: Path):
    line = without(whole(name, prefix), DENSE[name]) if name in DENSE else f"{SCRIPTS[name]} --dry-run"
    environment = os.environ | {"WORLD_SIZE": str(PROCESSES.get(name, 1))}
    command = [sys.executable, "-W", "ignore", "-m", "megatron.lm.pretrain", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == (0 if name in DENSE else 2), done.stderr
    assert ("nothing was started" in done.stdout) if name in DENSE else lines_of(done.stderr) == OTHERS[name]
