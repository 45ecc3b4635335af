"""A loop like DistributedDataParallel's at O2, gradients averaged in FP8: torchrun --nproc-per-node 2 examples/data_parallel.py"""

import os

import torch
import torch.distributed as dist

import msamp
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.recipe import FP32_STATES, O2
from msamp.numerics.tensor import fp32_values

cuda, rank, ranks = torch.cuda.is_available(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if cuda else "gloo")
group = dist.group.WORLD if ranks > 1 else None
torch.manual_seed(0)  # the same weights on every rank
model = msamp.convert(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 16)).to(device), O2)
weights, rest = ([p for p in model.parameters() if isinstance(p, msamp.ScalingTensor) == fp8] for fp8 in (True, False))
sync = msamp.grad_sync(model, {**dict.fromkeys(weights, O2.states.grad), **dict.fromkeys(rest, FP32_STATES.grad)}, group)
optimizer = msamp.FP8AdamW([{"params": weights, "formats": O2.states}, {"params": rest, "formats": FP32_STATES}], lr=2e-3)
scales, generator = ScalingState(model), torch.Generator().manual_seed(rank)  # other data on every rank
for step in range(61):
    batches = torch.randn(2, 64, 64, generator=generator).to(device)  # two micro-batches
    losses = [(model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean() / 2 for x in batches]
    with sync.no_sync():
        losses[0].backward()
    losses[1].backward()  # the gradients of both leave during this one
    sync.finish()
    optimizer.step()
    scales.roll(group)
    sync.clear()
    if rank == 0 and step % 10 == 0:
        print(f"step {step:2}  loss {sum(losses).item():.4f}  bytes sent {sync.sent.total('weight')}")
for p in model.parameters() if ranks > 1 else ():
    dist.broadcast(first := fp32_values(p.detach()).clone(), 0)
    assert first.equal(fp32_values(p.detach())), "the ranks have different weights"
