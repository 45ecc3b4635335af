"""Which exchange has which scaling, and the size of its buckets."""

import pytest

from megatron.lm.config import CommunicationConfig
from megatron.lm.config.parallel import exchange_names, grad_scalings, mu_rules
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
