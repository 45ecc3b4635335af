"""Predicted times: by hand in a small case, and what must make a step longer or shorter."""

import pytest

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.planning.memory import plan
from megatron.lm.planning.rates import GPUS, Cluster, MeasuredRate, Rates, rates_of
from megatron.lm.planning.time import PredictedStep, predict

SMALL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1024 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 9 --fp8-min-gain 0"
)


def flags(text: str) -> Config:
    return parse_args(text.split())


def step(text: str, gpus: int = 1, rates: Rates | None = None, network: float = 40e9) -> PredictedStep:
    config, rates = flags(text), rates or rates_of("h200")
    cluster = Cluster(gpus=gpus, per_host=8, link=320e9, network=network, latency=45e-6)
    return predict(config, cluster, rates, plan(config, gpus))


def only(**values: float) -> Rates:
    """The rates of the H200 with all but these so fast that they take no time."""
    fast = {"TFLOP/s": 1e30, "TB/s": 1e30, "GB/s": 1e30, "ps": 0.0, "us": 0.0, "share": 1.0}
    rows = [
        MeasuredRate(row.gpu, row.name, None, values.get(row.name.replace(" ", "_"), fast[row.unit]), row.unit, "", "")
        for row in rates_of("h200").rows
    ]
    return Rates(GPUS["h200"], tuple(rows), False)


def test_gemms_attention_and_update_by_hand():
    tokens, weights = 256, 2 * 12 * 256**2
    o3 = f"{SMALL} --precision O3"
    assert step(o3, rates=only(fp8_gemm=1.0)).seconds["linear"] == pytest.approx(6 * tokens * weights / 1e12)
    assert step(o3, rates=only(bf16_gemm=1.0)).seconds["LM head"] == pytest.approx(6 * tokens * 1024 * 256 / 1e12)
    assert step(f"{SMALL} --precision bf16", rates=only(bf16_gemm=1.0)).seconds["linear"] == pytest.approx(6 * tokens * weights / 1e12)
    # Forward 2 products over half of the sequence, backward 5: 7 x tokens x sequence x width, in each of 2 layers.
    assert step(o3, rates=only(attention=1.0)).seconds["attention"] == pytest.approx(2 * 7 * tokens * 128 * 256 / 1e12)
    # BF16: gradient read twice (8), master, m and v read and written (24), weight written (2).
    parameters = plan(flags(f"{SMALL} --precision bf16"), 1)[0].parameters
    assert step(f"{SMALL} --precision bf16", rates=only(update=1.0)).seconds["update"] == pytest.approx(34 * parameters / 1e12)


def test_the_bubble_of_a_pipeline():
    """p stages that take the same time: (p - 1) / m of the rest, and a V-th of that interleaved."""
    alike = only(attention=1e-3)
    model = f"{SMALL} --num-layers 8 --precision O3 --pipeline-model-parallel-size 4 --global-batch-size 16"
    found = step(model, 4, alike)
    assert found.seconds["bubble"] / found.seconds["attention"] == pytest.approx(3 / 8, rel=1e-3)
    chunked = step(f"{model} --num-layers-per-virtual-pipeline-stage 1", 4, alike)
    assert chunked.seconds["bubble"] / chunked.seconds["attention"] == pytest.approx(3 / 8 / 2, rel=5e-3)  # and the sends


def test_an_eager_step_takes_no_less_than_its_host():
    slow = only(host_fused=1e6)  # a second a layer
    assert step(f"{SMALL} --precision O3 --cuda-graph none", rates=slow).seconds["host"] == pytest.approx(2, rel=1e-3)
    assert "host" not in step(f"{SMALL} --precision O3", rates=slow).seconds
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert step(f"{SMALL} --precision O3 {again}", rates=slow).total > 2.6


def test_a_launch_adds_a_gradient_and_in_fp8_two_but_for_the_last():
    def launches(accumulated: str) -> float:
        text = f"{SMALL} --precision O3 --micro-batch-size 1 --global-batch-size 4 --grad-accum-dtype {accumulated}"
        return step(text, rates=only(launch=1e6)).seconds["weights"]

    assert launches("fp8-sr") - launches("bf16") == pytest.approx(2 * 4 * 4)  # layers, matrices, and 7 in place of 3


def test_what_makes_a_step_longer():
    model = "--preset 1.3b --global-batch-size 32 --precision O3 --fp8-min-gain 0"
    base = step(model).total
    for more in (
        "--deterministic",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--save-activations coat",
        "--fp8-recipe tensorwise",
        "--fp8-recipe blockwise",
        "--qk-layernorm",
        "--seq-length 4096",
        "--cuda-graph none",
    ):
        assert step(f"{model} {more}").total > base, more
    assert step("--preset 1.3b --global-batch-size 32 --precision bf16").total > base
    assert step(model, 8).total < base
    assert step(f"{model} --global-batch-size 64", 16, network=1e9).total > step(f"{model} --global-batch-size 64", 16).total


def test_the_exchange_hides_behind_backward():
    model = "--preset 1.3b --precision O2 --fp8-min-gain 0 --global-batch-size 64"
    assert "data-parallel, exposed" not in step(model, 8).seconds
    assert step(f"{model} --no-overlap-grad-reduce", 8).seconds["data-parallel, exposed"] > 0
    assert step(model, 16, network=0.1e9).seconds["data-parallel, exposed"] > 1


def test_layers_that_are_not_fused_wait_for_all_that_tensor_parallel_ranks_send():
    hidden, grid = only(**{"tp_exposed": 0.0, "tp_exposed,_copies": 0.0}), f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel"
    assert "tensor-parallel, exposed" not in step(f"{grid} --precision O3", 2, hidden).seconds
    assert step(f"{grid} --precision bf16", 2, hidden).seconds["tensor-parallel, exposed"] > 0
    assert step(f"{grid} --precision O3 --hidden-dropout 0.1", 2, hidden).seconds["tensor-parallel, assumed exposed"] > 0
