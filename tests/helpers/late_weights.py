"""Weights that ZeRO gathers late, on a CPU."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from msamp.comm.bucket import Bucket
from msamp.optim.states import payload
from msamp.parallel.greedy_zero import ZeRO


@contextlib.contextmanager
def late() -> Iterator[None]:
    """All-gathered weights arrive when something waits for them and no earlier, as they may on a GPU."""
    exchange = ZeRO._exchange

    def send(shard: ZeRO, bucket: Bucket) -> None:
        if not shard.overlaps:
            exchange(shard, bucket)
            return
        stored = [payload(p).data for p in bucket.params]
        before = [x.clone() for x in stored]
        exchange(shard, bucket)
        shard._pending[bucket] = [x.clone() for x in stored]  # type: ignore[assignment]
        for x, old in zip(stored, before, strict=True):
            x.copy_(old)

    def wait_for(shard: ZeRO, bucket: Bucket) -> None:
        shard._check_not_deferred()
        arrived: Any = shard._pending.get(bucket, [])
        for p, new in zip(bucket.params, arrived, strict=bool(arrived)):
            payload(p).data.copy_(new)

    with patch.multiple(ZeRO, _exchange=send, wait_for=wait_for):
        yield
