"""COAT: FP8 moments with range expansion, and FP8 inputs of norms and activations saved for backward: python examples/coat.py

The recipe sets the moments and the FP8 layers. `msamp.LayerNorm` and `msamp.Activation` save their inputs in E4M3, in groups of 16
channels. The same model with torch's layers and AdamW in FP32 trains on the same batches.
"""

import torch
from torch import nn

import msamp

KEPT = ("step", "master")  # states that are no moments


def train(model, optimizer):
    """Return the losses, the bytes of the moments, and the bytes that one forward saves for backward."""
    generator, losses, saved = torch.Generator().manual_seed(0), [], {}
    for _ in range(61):
        x = torch.randn(128, 64, generator=generator).to(device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
            loss = (model(x) - torch.tanh(x[:, :16] - x[:, 16:32])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        total = sum(getattr(t, "payload", t).nbytes for t in saved.values())
        saved.clear()
    moments = [
        getattr(value, "payload", value) for states in optimizer.state.values() for name, value in states.items() if name not in KEPT
    ]
    return losses, sum(moment.nbytes for moment in moments), total


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16)).to(device)
model = nn.Sequential(nn.Linear(64, 256), msamp.Activation("gelu"), msamp.LayerNorm(256), nn.Linear(256, 16)).to(device)
model.load_state_dict(plain.state_dict())
full = train(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3))
coat = train(*msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe="coat"))
for step in range(0, 61, 10):
    print(f"step {step:2}  loss {coat[0][step]:.4f}  in FP32 {full[0][step]:.4f}")
print(f"moments: {coat[1]} bytes, in FP32 {full[1]}; saved for backward: {coat[2]} bytes, in FP32 {full[2]}")
