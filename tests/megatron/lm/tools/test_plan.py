"""The planner's command line: what it prints, what it refuses, and that its flags make the run it planned."""

import json
import shlex
from typing import Any

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.planning import memory as dry_run
from megatron.lm.tools.plan import flags_of, main, table

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


def test_a_person_reads_the_grids_the_kinds_the_flags_and_the_source(capsys):
    assert main(shlex.split(f"{LINE} --top 1 --micro-batch-size 1")) == 0
    said = capsys.readouterr().out
    assert "7b, O3, 8 x NVIDIA H100 of 79 GiB, 131,072 tokens per step" in said
    for part in ("fullest process (stage 0), GiB: ", "sent per process and step, GB: grad", "time per step, ms: lin", "FLOPs per step"):
        assert part in said
    assert "flags: --preset 7b --precision O3" in said
    assert "none on NVIDIA H100: compute-bound rates are scaled" in said


def test_flags_of_the_trainer_fix_and_override(capsys):
    found = asked(
        "--model 13b --gpus 4 --gpu h200 --global-batch-size 16 --tensor-model-parallel-size 2 --micro-batch-size 2 --num-layers 8", capsys
    )
    assert {(one["tensor"], one["micro_batch"]) for one in found["grids"]} == {(2, 2)}
    shorter = asked("--model 13b --gpus 4 --gpu h200 --sequence-length 1024 --top 1 --micro-batch-size 1", capsys)
    assert shorter["sequence_length"] * shorter["global_batch_size"] == 4 * 2**20


def test_o0_is_bf16_and_a_smaller_gpu_holds_less(capsys):
    found = asked(f"{LINE} --precision O0 --top 1 --micro-batch-size 1", capsys)
    assert found["precision"] == "bf16"
    less = asked(f"{LINE} --gpu-memory-gib 30 --top 1 --micro-batch-size 1", capsys)
    assert less["grids"][0]["memory_bytes"] + dry_run.RESERVED <= 30 * dry_run.GIB


def test_slower_links_cost_time(capsys):
    line = "--model 1.3b --gpus 16 --gpu h200 --top 1 --global-batch-size 64 --tensor-model-parallel-size 2 --micro-batch-size 4"
    fast = asked(line, capsys)["grids"][0]
    assert asked(f"{line} --network-gb-s 1", capsys)["grids"][0]["step_seconds"] > fast["step_seconds"]
    assert asked(f"{line} --link-gb-s 50", capsys)["grids"][0]["step_seconds"] > fast["step_seconds"]


REFUSED = {
    "--model 6b --gpus 8 --gpu h100": "argument --model: invalid choice: '6b' (choose from",
    "--model 7b --gpus 0 --gpu h100": "argument --gpus: 0 is out of range: give 1 to 1048576",
    "--model 7b --gpus many --gpu h100": "argument --gpus: 'many' is not an integer",
    "--model 7b --gpus 8 --gpu a100": "--gpu 'a100' is unknown: choose one of h200, h100",
    "--model 7b --gpus 8 --gpu h100 --gpu-memory-gib 0": "argument --gpu-memory-gib: 0 is out of range: give a number above 0",
    "--model 7b --gpus 8 --gpu h100 --link-gb-s nan": "argument --link-gb-s: nan is out of range",
    "--model 7b --gpus 8 --gpu h100 --gpu-memory-gib 0.5": "no grid of 8 GPUs fits: the smallest needs about",
    "--model 7b --gpus 7 --gpu h100": "no grid divides this model and 7 GPUs: --global-batch-size 2048 is not divisible by",
    "--model 7b --gpus 8 --gpu h100 --tensor-model-parallel-size 3": "no grid divides this model and 8 GPUs",
    "--model 7b --gpus 8 --gpu h100 --precision O9": "O9",
    "--model 7b --gpus 8 --gpu h100 --precision fp32": "--precision fp32 uses FP32 GEMMs, which have no measured rate",
    "--model 7b --gpus 8 --gpu h100 --attention-precision auto": "decided by a measurement when a run starts: give fp8 or bf16 to a plan",
    "--model 7b --gpus 8 --gpu h100 --no-such-flag": "unknown flag --no-such-flag",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_one_line(line: str, capsys):
    try:
        code = main(shlex.split(line))
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert code == 2
    assert REFUSED[line] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_flags_say_all_that_was_searched():
    words = "--preset 13b --precision O3 --use-distributed-optimizer --seq-length 2048 --global-batch-size 64 --micro-batch-size 1"
    words += (
        " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --no-sequence-parallel"
    )
    words += " --cuda-graph none --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert flags_of(parse_args(words.split()), "13b") == words.split()


GRID: dict[str, Any] = {
    "tensor": 1,
    "context": 1,
    "expert": 1,
    "pipeline": 1,
    "data": 8,
    "micro_batches": 4,
    "micro_batch": 1,
    "layers_a_virtual_stage": None,
    "recompute": "none",
    "memory_bytes": 2**36,
    "step_seconds": 1.5,
    "tokens_s_gpu": 1e4,
    "mfu": [0.5],
}


def test_context_parallelism_is_in_flags_and_table():
    words = "--preset llama3-8b --precision O3 --use-distributed-optimizer --seq-length 131072 --global-batch-size 4 --micro-batch-size 1"
    words += " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 4 --sequence-parallel"
    assert flags_of(parse_args(words.split()), "llama3-8b") == words.split()
    heads = words.replace("--sequence-parallel", "--cp-comm-type a2a --sequence-parallel")
    assert flags_of(parse_args(heads.split()), "llama3-8b") == heads.split()
    grid = GRID | {"tensor": 2, "context": 4, "context_comm": "p2p", "data": 1}
    assert table([grid])[1].startswith("2 x 1 x 1, CP 4 p2p ")
    assert table([grid | {"context": 1}])[1].startswith("2 x 1 x 1   ")


def test_expert_parallelism_is_in_flags_and_table():
    words = "--preset olmoe-1b-7b --precision O3 --use-distributed-optimizer --seq-length 4096 --global-batch-size 64 --micro-batch-size 1"
    words += " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4"
    assert flags_of(parse_args(words.split()), "olmoe-1b-7b") == words.split()
    assert table([GRID | {"expert": 4}])[1].startswith("1 x 1 x 8, EP 4 ")
