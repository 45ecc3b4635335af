"""The plain loop on several processes, at O2 in the same two lines: torchrun --nproc-per-node 2 examples/plain_loop_torchrun.py

In place of DistributedDataParallel, `msamp.initialize` starts every rank from rank 0's weights and averages the gradients in FP8 during
backward. A second model averages in BF16, and each line has the bytes that rank 0 has sent for both.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

import msamp

cuda, rank, ranks = torch.cuda.is_available(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
torch.cuda.set_device(device) if cuda else None
dist.init_process_group("nccl" if cuda else "gloo") if ranks > 1 else None
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
other = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

model, optimizer = msamp.initialize(model, optimizer, recipe="O2")

in_bf16 = msamp.initialize(other, torch.optim.AdamW(other.parameters(), lr=2e-3), recipe="O2", grad_format="bf16")
generator = torch.Generator().manual_seed(rank)  # different data on every rank
for step in range(61):
    x = torch.randn(128, 64, generator=generator).to(device)
    losses, sent = [], []
    for network, its_optimizer in ((model, optimizer), in_bf16):
        loss = (network(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean()
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(its_optimizer.grad_sync.sent.total("weight") if ranks > 1 else 0)
    if rank == 0 and step % 10 == 0:
        print(f"step {step:2}  loss {losses[0]:.4f}  bytes sent {sent[0]}    averaged in BF16 {losses[1]:.4f}, {sent[1]}")
if ranks > 1:
    for p in model.parameters():
        dist.broadcast(first := msamp.fp32_values(p).clone(), 0)
        assert first.equal(msamp.fp32_values(p)), "the ranks have different weights"
    dist.destroy_process_group()
