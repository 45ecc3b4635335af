"""A BF16 model without FP32 copies, with Collage-plus and with BF16 alone: python examples/collage.py

A second BF16 number per weight and second moment stores what BF16 rounds away: 12 bytes per parameter; with FP32 masters, 16. BF16 alone
(option "a", 8 bytes) loses every update that is less than half a unit in the weight's last place, which most are at a small learning rate.
"""

import copy

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device).bfloat16()
models = {"plus": model, "a": copy.deepcopy(model)}
optimizers = {v: msamp.collage_adamw(m.parameters(), lr=1e-3, betas=(0.9, 0.999), variant=v) for v, m in models.items()}

for step in range(161):
    x = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
    losses, lost = {}, {}
    for variant, optimizer in optimizers.items():
        loss = (models[variant](x) - torch.tanh(x[:, :16] - x[:, 16:32])).float().square().mean()
        loss.backward()
        if step and step % 20 == 0:
            losses[variant] = loss.item()
            lost[variant] = 100 * msamp.update_quality(optimizer).lost_frac  # share of weights whose update is lost to rounding
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        shown = f"loss {losses['plus']:.4f}  updates lost {lost['plus']:.1f} %"
        print(f"step {step:3}  {shown}    in BF16 alone {losses['a']:.4f}, {lost['a']:.1f} %")
