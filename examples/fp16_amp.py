"""FP16 with loss scaling, for GPUs without FP8, with Apex's two lines: python examples/fp16_amp.py

O0 to O3 are those of Apex here: FP32; FP16 GEMMs by autocast; FP16 weights with FP32 masters; FP16 throughout.
"""

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

model, optimizer = msamp.amp.initialize(model, optimizer, opt_level="O2")

for step in range(61):
    x = torch.randn(128, 64, device=device)
    loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).float().square().mean()
    with msamp.amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(msamp.amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")
