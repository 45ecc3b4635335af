"""A BF16 model without FP32 copies, with Collage-plus: python examples/collage.py

A second BF16 number per weight and second moment stores what BF16 rounds away: 12 bytes per parameter; with FP32 masters, 16.
"""

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device).bfloat16()
optimizer = msamp.collage_adamw(model.parameters(), lr=2e-3, betas=(0.9, 0.999), variant="plus")

for step in range(61):
    x = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
    loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).float().square().mean()
    loss.backward()
    if step and step % 10 == 0:
        lost = msamp.update_quality(optimizer).lost_frac  # share of weights whose update is lost to rounding
        print(f"step {step:2}  loss {loss.item():.4f}  updates lost {100 * lost:.1f} %")
    optimizer.step()
    optimizer.zero_grad()
