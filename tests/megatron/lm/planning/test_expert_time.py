"""Times of mixtures of experts: against measured steps, which collectives wait, and the kernels of a router."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import tiny
from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.model.moe.router import routers, scale_losses
from megatron.lm.planning import expert_time
from megatron.lm.planning.memory import plan
from megatron.lm.planning.rates import GPUS, Cluster, MeasuredRate, Rates, rates_of
from megatron.lm.planning.time import PredictedStep, predict

EXPERTS, RECOMPUTED = "--expert-model-parallel-size 2", "--recompute-granularity selective --recompute-modules mlp"
# OLMoE's shape, 8 layers, 8 micro-batches of 4,096 tokens per card on H200s (tools/bench/results/moe.csv, 757f8790): flags, cards,
# milliseconds, and by how many percent the prediction may differ. O0's step gave a rate. The load of this data was uneven: on two cards all
# wait for the one whose experts have more rows.
MEASURED = [
    ("--opt-level O0", 1, 605.8, 0.5),
    ("--opt-level O2", 1, 372.0, 2),
    ("--opt-level O3", 1, 366.4, 2),
    ("--opt-level O3", 2, 389.8, 4),
    (f"--opt-level O3 {EXPERTS}", 2, 373.1, 11),
    (f"--opt-level O3 {EXPERTS} --moe-wire fp8-sums", 2, 375.1, 11),
    (f"--opt-level O3 {EXPERTS} {RECOMPUTED}", 2, 395.1, 11),
    (f"--opt-level O0 {EXPERTS}", 2, 868.8, 11),
]


def olmoe(text: str, cards: int = 1) -> Config:
    return parse_args(f"--preset olmoe-1b-7b --num-layers 8 --micro-batch-size 1 --global-batch-size {8 * cards} {text}".split())


def seconds(kind: str, text: str, cards: int = 1, **rates: float) -> float:
    """Seconds of a kind in a step of one layer, with only these rates."""
    return step(f"--num-layers 1 {text}", cards, only(**rates)).seconds[kind]


def step(text: str, cards: int = 1, rates: Rates | None = None) -> PredictedStep:
    rates = rates_of("h200") if rates is None else rates
    link, config = rates("link"), olmoe(text, cards)
    return predict(config, Cluster(gpus=cards, per_host=8, link=link, network=link, latency=rates("latency")), rates, plan(config, cards))


def only(**values: float) -> Rates:
    """The rates of the H200 with all but these so fast that they take no time."""
    fast = {"TFLOP/s": 1e30, "TB/s": 1e30, "GB/s": 1e30, "ps": 0.0, "us": 0.0, "share": 1.0}
    named = {name.replace("_", " ").replace("  ", ", "): value for name, value in values.items()}
    rows = [MeasuredRate(r.gpu, r.name, None, named.get(r.name, fast[r.unit]), r.unit, "", "") for r in rates_of("h200").rows]
    return Rates(GPUS["h200"], tuple(rows), False)


@pytest.mark.parametrize(("flags", "cards", "ms", "percent"), MEASURED)
def test_steps_are_predicted_as_measured(flags: str, cards: int, ms: float, percent: float):
    assert 1e3 * step(flags, cards).total == pytest.approx(ms, rel=percent / 100)


@pytest.mark.parametrize(("wire", "calls"), [("fp8", 5), ("fp8-sums", 7)])
def test_collectives_of_experts_wait_but_the_sum_that_hides(wire: str, calls: int):
    """Of tokens, results and their gradients four, of which one hides, two of the router, and with FP8 sums two of amaxes."""
    flags = f"--opt-level O3 {EXPERTS} --moe-wire {wire}"
    assert seconds("expert-parallel, exposed", flags, 2, latency=45.0) == pytest.approx(8 * calls * 45e-6)
    assert "expert-parallel, exposed" not in step("--num-layers 1 --opt-level O3", 2).seconds


class Kernels(TorchDispatchMode):
    """Counts the operators that compute, each a kernel on a GPU."""

    FREE = frozenset({"view", "t", "expand", "detach", "slice", "select", "unsqueeze", "as_strided", "_unsafe_view", "empty", "alias"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().split("::")[1].split(".")[0] not in self.FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("losses", [(), ("aux", "z")])
def test_the_router_launches_as_many_kernels_as_are_counted(losses: tuple[str, ...]):
    settings = {f"moe_{name}_loss_coeff": 0.01 for name in losses} | {"num_experts": 8, "moe_router_pre_softmax": True}
    config = tiny.config("corpus", precision="bf16", num_layers=1, swiglu=True, disable_bias_linear=True, **settings)
    with tiny.started(config):
        scale_losses(1)
        (router,) = routers(build_training(config, tiny.VOCABULARY).model)
        x = torch.randn(16, 4, 32, dtype=router.weight.dtype, requires_grad=True)
        with Kernels() as kernels:
            probs, _ = router(x)
            grad = probs.detach()
            torch.autograd.grad(probs, [x, router.weight], grad)
    expected = expert_time.KERNELS + expert_time.KERNELS_AUX * ("aux" in losses) + expert_time.KERNELS_Z * ("z" in losses)
    assert kernels.count == expected
