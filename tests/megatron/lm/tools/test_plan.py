"""The planner's command line: what it prints, what it refuses, and that its flags make the run it planned."""

import json
import shlex

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.planning import memory as dry_run
from megatron.lm.tools.plan import flags_of, main

LINE = "--model 7b --gpus 8 --gpu h100 --global-batch-size 64"


def asked(text: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(shlex.split(f"{text} --json")) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_as_json_is_the_dry_run_s_memory_and_adds_up(capsys):
    found = asked(f"{LINE} --top 2", capsys)
    assert (found["model"], found["gpu"], found["gpus"], found["precision"]) == ("7b", "NVIDIA H100", 8, "O3")
    assert len(found["grids"]) == 2
    for one in found["grids"]:
        config = parse_args([*shlex.split(one["flags"]), "--dry-run", "--fp8-min-gain", "0"])
        check(config, 8)
        assert one["tensor"] * one["pipeline"] * one["data"] == 8
        assert one["memory_bytes"] == max(rank.total for rank in dry_run.plan(config, 8))
        assert one["step_seconds"] == pytest.approx(sum(one["seconds"].values()))
        assert one["wire_bytes"] == pytest.approx(sum(one["wire"].values()))
        assert one["tokens_s_gpu"] == pytest.approx(64 * 2048 / one["step_seconds"] / 8)
        assert one["mfu"][0] == pytest.approx(one["flops"] / one["step_seconds"] / 8 / 989e12)
    first, second = found["grids"]
    assert first["step_seconds"] <= second["step_seconds"]


def test_a_person_reads_the_flags_and_the_source(capsys):
    assert main(shlex.split(f"{LINE} --top 1 --micro-batch-size 1")) == 0
    said = capsys.readouterr().out
    assert "flags: --preset 7b --precision O3" in said
    assert "none on NVIDIA H100: compute-bound rates are scaled" in said


def test_flags_of_the_trainer_fix_and_override(capsys):
    found = asked(
        "--model 13b --gpus 4 --gpu h200 --global-batch-size 16 --tensor-model-parallel-size 2 --micro-batch-size 2 --num-layers 8", capsys
    )
    assert {(one["tensor"], one["micro_batch"]) for one in found["grids"]} == {(2, 2)}
    shorter = asked("--model 13b --gpus 4 --gpu h200 --sequence-length 1024 --top 1 --micro-batch-size 1", capsys)
    assert shorter["sequence_length"] * shorter["global_batch_size"] == 4 * 2**20


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("--model 6b --gpus 8 --gpu h100", "--model"),
        ("--model 7b --gpus 0 --gpu h100", "--gpus"),
        ("--model 7b --gpus 8 --gpu a100", "--gpu"),
        ("--model 7b --gpus 8 --gpu h100 --link-gb-s nan", "--link-gb-s"),
        ("--model 7b --gpus 8 --gpu h100 --gpu-memory-gib 0.5", "--gpus"),
        ("--model 7b --gpus 7 --gpu h100", "--global-batch-size 2048"),
        ("--model 7b --gpus 8 --gpu h100 --precision O9", "O9"),
        ("--model 7b --gpus 8 --gpu h100 --precision fp32", "--precision fp32"),
        ("--model 7b --gpus 8 --gpu h100 --attention-precision auto", "--attention-precision"),
        ("--model 7b --gpus 8 --gpu h100 --no-such-flag", "--no-such-flag"),
    ],
)
def test_a_refusal_is_one_line(line: str, culprit: str, capsys):
    try:
        code = main(shlex.split(line))
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert culprit in said.err


RUN = (
    "--precision O3 --use-distributed-optimizer --seq-length 2048 --global-batch-size 64 --micro-batch-size 1 --tensor-model-parallel-size"
)
PP = "--pipeline-model-parallel-size"
TAIL = "--cuda-graph none --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    "words",
    [
        f"13b {RUN} 1 {PP} 4 --num-layers-per-virtual-pipeline-stage 5 --no-sequence-parallel {TAIL}",
        f"llama3-8b {RUN} 2 {PP} 1 --context-parallel-size 4 --cp-comm-type a2a --sequence-parallel",
        f"olmoe-1b-7b {RUN} 1 {PP} 1 --expert-model-parallel-size 4",
    ],
)
def test_flags_name_everything_that_was_searched(words: str):
    line = f"--preset {words}".split()
    made = parse_args(line)
    assert flags_of(line[1], made.precision.name, made.model.seq_length, made.parallel, made.training) == line
