"""COAT: FP8 moments with range expansion, and FP8 inputs of norms and activations saved for backward: python examples/coat.py

The recipe sets the moments and the FP8 layers. `msamp.LayerNorm` and `msamp.Activation` save their inputs in E4M3, in groups of 16
channels.
"""

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), msamp.Activation("gelu"), msamp.LayerNorm(256), nn.Linear(256, 16)).to(device)
model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe="coat")

for step in range(61):
    x = torch.randn(128, 64, device=device)
    loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")
