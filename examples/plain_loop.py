"""Two lines in a plain PyTorch loop, at O2: python examples/plain_loop.py

`msamp.initialize` converts model and optimizer before the first step. Linear layers run in FP8; everything else stays as it was.
"""

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

model, optimizer = msamp.initialize(model, optimizer, recipe="O2", clip_grad=1.0)
print(model)  # shows which layer runs in which precision

for step in range(61):
    x = torch.randn(128, 64, device=device)
    loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")
