"""Which exchange has which scaling, and the size of its buckets."""

import pytest

from megatron.lm.config import CommunicationConfig
from megatron.lm.config.parallel import exchange_names, exchanges, grad_scalings
from msamp.comm import grad_sync


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


def test_exchanges_and_scalings_are_those_of_the_synchroniser():
    assert exchange_names() == grad_sync.EXCHANGES
    assert grad_scalings() == ("auto", "pre", "post")
    assert {name: found.sums_in_fp32 for name, found in exchanges().items()} == {"fp32-sum": True, "nccl": False}
