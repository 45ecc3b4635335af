"""A transformer at O3, its optimizer sharded over the ranks by greedy ZeRO: torchrun --nproc-per-node 2 examples/greedy_zero.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

import msamp

cuda, rank, ranks = torch.cuda.is_available(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if cuda else "gloo")
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(64, 64), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(64, 64)).to(device)
# Every rank starts from rank 0's weights; at O3 ZeRO is the default.
model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), opt_level="O3", clip_grad=1.0)
generator = torch.Generator().manual_seed(rank)  # different data on every rank
for step in range(31):
    tokens = torch.randint(64, (32, 16), generator=generator).to(device)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 + 3).flatten() % 64)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        sent = optimizer.grad_sync.sent.total("weight") if optimizer.grad_sync else 0
        print(f"step {step:2}  loss {loss.item():.4f}  bytes sent {sent}")
stored = sum(getattr(state, "payload", state).nbytes for states in optimizer.state.values() for state in states.values())
plain = 8 * sum(p.numel() for p in model.parameters())  # two moments in FP32
print(f"rank {rank} of {ranks} stores {stored} bytes of optimizer states, masters among them; AdamW without ZeRO stores {plain}")
if ranks > 1:
    for p in model.parameters():
        dist.broadcast(first := msamp.fp32_values(p).clone(), 0)
        assert first.equal(msamp.fp32_values(p)), "the ranks have different weights"
    dist.destroy_process_group()
