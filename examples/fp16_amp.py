"""FP16 with loss scaling, for GPUs without FP8, with Apex's two lines: python examples/fp16_amp.py

O0 to O3 are those of Apex here: FP32; FP16 GEMMs by autocast; FP16 weights with FP32 masters; FP16 throughout. O0 trains on the same
batches, and each line prints the share of gradients that would be 0 in FP16 without the scale.
"""

import copy

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
copies = {"O2": model, "O0": copy.deepcopy(model)}
pairs = {level: msamp.amp.initialize(m, torch.optim.AdamW(m.parameters(), lr=2e-3), opt_level=level) for level, m in copies.items()}

for step in range(61):
    x = torch.randn(128, 64, device=device)
    losses, vanished = {}, 0.0
    for level, (model, optimizer) in pairs.items():
        loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).float().square().mean() / 1000  # small, as in a long average
        with msamp.amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        grads = torch.cat([p.grad.flatten() for p in msamp.amp.master_params(optimizer)])
        if level == "O0":
            vanished = (grads.half() == 0).float().mean().item()
        nn.utils.clip_grad_norm_(msamp.amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[level] = 1000 * loss.item()
    if step % 10 == 0:
        print(f"step {step:2}  loss {losses['O2']:.4f}  in FP32 {losses['O0']:.4f}  zero without the scale {100 * vanished:.1f} %")
