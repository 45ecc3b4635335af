"""Updates that a CUDA graph may contain neither read a tensor's value nor copy from the host: shown without a GPU, on fake CUDA tensors."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from msamp.numerics.recipe import by_name
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.updates.update import StepInputs

FAKE = FakeTensorMode()  # which raises where a value is read


class NoCopies(TorchDispatchMode):
    """Fails at a copy from the host, apart from those of `Tables`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            assert not (args[0].is_cpu and torch.device((kwargs or {}).get("device") or "cpu").type == "cuda"), "a copy from the host"
        return func(*args, **(kwargs or {}))


class FakeTables:
    def send(self, key: Any, numbers: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(len(numbers), dtype=dtype, device="cuda")


def fake(x: Any) -> Any:
    if isinstance(x, ScalingTensor):
        return ScalingTensor(fake(x.payload), fake(x.scale_inv), x.dtype)
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")
    if isinstance(x, list):
        return [fake(y) for y in x]
    return {key: fake(y) for key, y in x.items()} if isinstance(x, dict) else x


@pytest.mark.skipif(not torch.version.cuda, reason="a build of torch for CPUs has no CUDA tensors: make test-newest")
@pytest.mark.parametrize("update", ["sgd-momentum", "muon"])
@pytest.mark.parametrize("level", ["bf16", "O3"])
def test_an_update_neither_reads_nor_copies(level: str, update: str):
    p = torch.nn.Parameter(torch.randn(64, 32))
    optimizer = LowPrecisionOptimizer([p], lr=0.5, weight_decay=0.1, formats=by_name(level).states.varied(update=update))
    for _ in range(2):
        p.grad = torch.randn(64, 32)
        optimizer.step()
    ready = optimizer.ready()
    decision = optimizer.decide(ready)
    for batch in optimizer.batches(ready):
        with FAKE, NoCopies():
            tensors = {f.name: fake(getattr(batch, f.name)) for f in fields(batch) if f.name not in ("update", "group", "formats")}
            inputs = StepInputs(*map(fake, (decision.amaxes, optimizer._kept.table, decision.coefficient, decision.usable)))
            batch.update.run(FakeTables(), replace(batch, **tensors), inputs)  # type: ignore[arg-type]
