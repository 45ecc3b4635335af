"""Which exchange has which scaling, and the size of its buckets."""

import pytest

from megatron.lm.config import CommunicationConfig, ParallelConfig
from megatron.lm.config.sections.parallel import AXES, Axes, exchange_names, grad_scalings, mu_rules
from msamp.comm import exchange


@pytest.mark.parametrize(
    ("flags", "scaling", "rule"),
    [
        ({}, None, None),
        ({"grad_exchange": "nccl"}, "auto", "halve"),
        ({"grad_exchange": "nccl", "mu_rule": "paper"}, "auto", "paper"),
        ({"grad_exchange": "nccl", "grad_scaling": "pre"}, "pre", None),
    ],
)
def test_only_the_sum_of_nccl_has_a_mu(flags, scaling, rule):
    communication = CommunicationConfig(**flags)
    assert (communication.gradient_scaling, communication.mu_adaptation) == (scaling, rule)


def test_buckets_hold_2_to_the_27_elements_unless_told():
    assert CommunicationConfig().bucket_size == 2**27
    assert CommunicationConfig(ddp_bucket_size=100).bucket_size == 100


def test_choices_are_those_of_the_tables(monkeypatch):
    monkeypatch.setattr(exchange, "_EXCHANGES", dict(exchange._EXCHANGES))
    assert exchange_names() == ("fp32-sum", "nccl")
    assert grad_scalings() == ("auto", "pre", "post")
    assert mu_rules() == ("halve", "paper")
    mine = exchange.Exchange(name="mine", wire=exchange.FP32SumWire, sums_in_fp32=True)
    exchange.register(mine)
    assert exchange_names() == ("fp32-sum", "nccl", "mine")
    assert CommunicationConfig(grad_exchange="mine").exchange == mine
    assert CommunicationConfig(grad_exchange="mine").gradient_scaling is None


def test_axes_follow_from_the_settings_and_the_number_of_processes():
    dense = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert dense.axes(64) == Axes(tensor=2, context=1, data=8, pipeline=4, expert=1, expert_tensor=2, expert_data=8)
    assert (dense.unit, dense.axes(64).model, dense.axes(64).copies) == (8, 8, 8)
    assert str(dense.axes(64)) == "TP 2 x PP 4 x DP 8"
    assert dense.given == {AXES["tensor"]: 2, AXES["pipeline"]: 4}
    long = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=4)
    assert (long.unit, long.axes(64).data, long.axes(64).copies) == (8, 8, 32)
    assert str(long.axes(64)) == "TP 2 x CP 4 x PP 1 x DP 8"
    moe = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    assert (moe.unit, moe.axes(64).data, moe.axes(64).expert_data, moe.axes(64).splits_experts) == (8, 32, 8, True)
    assert str(moe.axes(64)) == "TP 2 x PP 1 x DP 32, experts: TP 1 x EP 8 x DP 8"
    assert moe.given == {AXES["tensor"]: 2, AXES["pipeline"]: 1, AXES["expert"]: 8, AXES["expert tensor"]: 1}
