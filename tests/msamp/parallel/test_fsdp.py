"""How a rank's rows are found. What the optimizer does with them is in `tests/msamp/integrations/test_fsdp.py`."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers import dist
from msamp.parallel.fsdp import check_cut, rows_of


def shares(rows: int) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2,))
    p = DTensor.from_local(torch.zeros(-(-rows // 2), 4), mesh, [Shard(0)], shape=torch.Size((rows, 4)), stride=(4, 1))
    with pytest.raises(ValueError, match=r"weight is placed as .*Replicate.* remove shard_placement_fn, HSDP"):
        check_cut("weight", DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()]))
    check_cut("weight", p)
    return [(share.start, share.stop) for share in (rows_of(p, 0), rows_of(p, 1))]


def test_rows_are_shared_equally_and_the_last_rank_has_fewer_or_none():
    assert dist.run(shares, 2, 5) == [[(0, 3), (3, 5)]] * 2


def test_a_whole_parameter_is_refused():
    with pytest.raises(ValueError, match=r"weight is not sharded; call torch.distributed.fsdp.fully_shard"):
        check_cut("weight", torch.zeros(4, 4))
