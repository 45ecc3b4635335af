"""Who stands on which host, and how long an exchange takes."""

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.planning.cluster import Cluster


def machines(gpus: int) -> Cluster:
    return Cluster(gpus=gpus, per_host=8, link=100.0, network=10.0, latency=0.0)


def config(tp: int, pp: int = 1):
    return parse_args(["--preset", "1.3b", "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)])


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "peers"), [(8, 1, 1, (8, 8)), (8, 2, 1, (4, 4)), (32, 2, 1, (16, 4)), (32, 8, 1, (4, 1)), (32, 4, 4, (2, 2))]
)
def test_data_parallel_ranks_of_one_host(gpus: int, tp: int, pp: int, peers: tuple[int, int]):
    assert machines(gpus).data_parallel_peers(config(tp, pp)) == peers


def test_an_exchange_goes_to_each_peer_over_its_link():
    assert machines(1).exchange_seconds(600.0, config(1)) == 0
    assert machines(8).exchange_seconds(700.0, config(1)) == pytest.approx(7.0)  # 100 bytes to each of 7
    assert machines(16).exchange_seconds(1500.0, config(1)) == pytest.approx(7.0 + 80.0)  # 7 near, 8 far
    assert machines(32).exchange_seconds(300.0, config(8)) == pytest.approx(30.0)


def test_stages_cross_hosts_where_one_fills_a_host():
    assert not machines(8).crosses_hosts(config(2, 4))
    assert machines(32).crosses_hosts(config(8, 4))
    assert not machines(16).crosses_hosts(config(1, 8))
