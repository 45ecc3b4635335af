"""A data-parallel loop at O2 from the parts of the library: torchrun --nproc-per-node 2 examples/data_parallel.py

`plain_loop_torchrun.py` does the same in two lines, next to an average in BF16. Here two micro-batches share one average.
"""

import os

import torch
import torch.distributed as dist

import msamp
from msamp import recipes

cuda, rank, ranks = torch.cuda.is_available(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
torch.cuda.set_device(device) if cuda else None
dist.init_process_group("nccl" if cuda else "gloo") if ranks > 1 else None
torch.manual_seed(0)  # equal weights
model = msamp.convert(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 16)).to(device), recipes.O2)
weights, rest = ([p for p in model.parameters() if isinstance(p, msamp.ScalingTensor) == fp8] for fp8 in (True, False))
optimizer = msamp.LowPrecisionOptimizer(
    [{"params": weights, "formats": recipes.O2.states}, {"params": rest, "formats": recipes.FP32_STATES}], lr=2e-3
)
formats = dict.fromkeys(weights, recipes.O2.states.grad) | dict.fromkeys(rest, recipes.FP32_STATES.grad)
sync = msamp.grad_sync(model, formats, dist.group.WORLD if ranks > 1 else None)
scales, generator = msamp.ScalingState(model), torch.Generator().manual_seed(rank)  # different data on every rank
for step in range(61):
    data = torch.randn(2, 64, 64, generator=generator).to(device)  # two micro-batches
    losses = [(model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean() / 2 for x in data]
    with sync.no_sync():
        losses[0].backward()
    losses[1].backward()  # reduces the accumulated gradients of both during this backward
    sync.finish()
    optimizer.step()
    scales.roll(sync.peers.group, optimizer.usable)  # without the amaxes of a skipped step
    sync.clear()
    if rank == 0 and step % 10 == 0:
        print(f"step {step:2}  loss {sum(losses).item():.4f}  bytes sent {sync.sent.total('weight')}")
if ranks > 1:
    values = torch.cat([msamp.fp32_values(p).flatten() for p in model.parameters()])
    dist.broadcast(first := values.clone(), 0)
    assert first.equal(values), "the ranks have different weights"
    dist.destroy_process_group()
