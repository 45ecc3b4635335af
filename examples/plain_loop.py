"""Two lines in a plain PyTorch loop, at O2, next to the same loop in FP32: python examples/plain_loop.py

`msamp.initialize` converts model and optimizer before the first step. Linear layers run in FP8; everything else stays as it was.
"""

import copy

import torch
from torch import nn

import msamp


def train(model, optimizer):
    """Any loop: the same batches for both models; returns the losses and the bytes of weights and optimizer states."""
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(61):
        x = torch.randn(128, 64, generator=generator).to(device)
        loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tensors = [*model.parameters(), *(value for states in optimizer.state.values() for value in states.values())]
    return losses, sum(getattr(tensor, "payload", tensor).nbytes for tensor in tensors)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
plain = copy.deepcopy(model)
plain_losses, plain_bytes = train(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3))

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = msamp.initialize(model, optimizer, recipe="O2", clip_grad=1.0)
print(model)  # shows which layer runs in which precision
losses, stored = train(model, optimizer)

for step in range(0, 61, 10):
    print(f"step {step:2}  loss {losses[step]:.4f}  in FP32 {plain_losses[step]:.4f}")
print(f"weights and optimizer states: {stored} bytes, in FP32 {plain_bytes}")
