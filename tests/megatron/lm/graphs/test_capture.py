"""What can be captured, and how many micro-batches a stage has under way; the stages themselves: test_stage_graph."""

import importlib.util

import pytest
import torch

from helpers import tiny
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.graphs import step_graph
from megatron.lm.planning.memory import captured

SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1024 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 9 --fp8-min-gain 0"
)
MOE = "--num-experts 4 --swiglu --disable-bias-linear"
CAPTURED = {
    "": True,
    "--tensor-model-parallel-size 2 --sequence-parallel": True,
    "--tensor-model-parallel-size 2": False,
    "--pipeline-model-parallel-size 2": True,
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": True,
    "--pipeline-model-parallel-size 2 --cuda-graph none": False,
    "--pipeline-model-parallel-size 2 --cuda-graph micro-batch": True,
    "--cuda-graph none": False,
    "--grad-accum-on owner": True,
    "--grad-accum-on owner --pipeline-model-parallel-size 2": False,
    "--hidden-dropout 0.1": False,
    "--attention-dropout 0.1": False,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": False,
    "--recompute-granularity selective": True,
    "--recompute-granularity selective --qk-layernorm": True,
    "--recompute-granularity selective --bf16-linears linear_qkv": False,
    "--grad-accum-dtype fp8": True,
    "--grad-accum-dtype fp8-sr --pipeline-model-parallel-size 2": False,
    f"{MOE} --recompute-granularity selective --recompute-modules mlp": True,
    f"{MOE} --recompute-granularity selective --recompute-modules mlp core_attn": False,
    f"{MOE} --recompute-granularity selective --recompute-modules mlp --moe-layer-freq 2": False,
    f"{MOE} --recompute-granularity selective --recompute-modules mlp --moe-shared-expert-intermediate-size 64": False,
}


def flags(text: str) -> Config:
    return parse_args(text.split())


def test_a_step_is_captured_where_the_trainer_captures_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for text, is_captured in CAPTURED.items():
        config = flags(f"{SMALL} --precision O3 {text}")
        assert captured(config) == (step_graph.choose(*tiny.parts(config))[0] != "none") == is_captured, text


@pytest.mark.parametrize(
    ("capability", "precision", "reason"),
    [
        ((8, 0), "bf16", "no kernel"),
        ((9, 0), "bf16", ""),
        ((10, 3), "bf16", ""),
        ((12, 0), "bf16", "no kernel"),
        ((8, 9), "O3", ""),
        ((12, 0), "O3", ""),
    ],
)
def test_experts_are_captured_where_no_host_reads_their_sizes(capability, precision, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = step_graph.obstacle(*tiny.parts(flags(f"{SMALL} --precision {precision} {MOE}"))) or ""
    assert (reason in found) if reason else not found
