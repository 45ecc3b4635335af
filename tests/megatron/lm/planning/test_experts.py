"""Memory of mixtures of experts by hand; tests/tools/bench/test_check_plan.py compares it with measured peaks."""

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.planning.experts import backward_of_a_layer, kept_per_token, weights_by_columns
from megatron.lm.planning.memory import plan


def olmoe(text: str) -> Config:
    return parse_args(f"--preset olmoe-1b-7b --micro-batch-size 1 {text}".split())


def test_a_layer_by_hand():
    experts, k, hidden, width = 64, 8, 2048, 1024
    router = 3 * 4 * experts + 16 * k  # softmax before top-k, auxiliary loss, z loss
    fp8, wide = olmoe("--opt-level O3"), olmoe("--opt-level O0")
    assert kept_per_token(fp8, 1) == router + hidden + k * (4 * width + 16)
    assert kept_per_token(wide, 2) == router + k * (2 * hidden + 18 * width + 16)
    assert weights_by_columns(fp8) == experts * 3 * width * hidden
    assert weights_by_columns(olmoe("--opt-level O2")) == 2 * weights_by_columns(fp8)
    assert weights_by_columns(wide) == 0
    shared = olmoe("--opt-level O3 --moe-shared-expert-intermediate-size 512")
    assert kept_per_token(shared, 1) - kept_per_token(fp8, 1) == hidden + 2 * 2 * 512 + 512
    assert backward_of_a_layer(fp8, 10) == 10 * (5 * hidden + k * (hidden + 7 * width)) + 2 * experts * 3 * width * hidden


def test_processes_that_share_experts_have_fewer_of_them_and_rows_of_all():
    alone, shared = (olmoe(f"--opt-level O3 --global-batch-size 4 {more}") for more in ("", "--expert-model-parallel-size 4"))
    router = 3 * 4 * 64 + 16 * 8
    assert kept_per_token(shared, 1) - router == 4 * (kept_per_token(alone, 1) - router)
    assert weights_by_columns(shared) == weights_by_columns(alone) // 4
    tensor = olmoe(
        "--opt-level O3 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    )
    assert kept_per_token(tensor, 1) == kept_per_token(shared, 1) / 2, "each routes half of the sequence"
    experts = 16 * 64 * 3 * 1024 * 2048
    for one, other in zip(plan(alone, 4), plan(shared, 4), strict=True):
        assert one.weight - other.weight == experts * 3 // 4
        # Each expert has one copy, so that ZeRO does not divide its states.
        assert other.states["m"] >= experts // 4
