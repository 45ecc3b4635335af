"""A small convolutional network at O2: python examples/convolution.py

Convolutions stay as they are, and the linear layers after them run in FP8. `msamp.survey` reports how much of the network that is.
"""

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 16),
).to(device)  # fmt: skip
model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe="O2")
print(msamp.survey(model))

for step in range(61):
    labels = torch.randint(16, (64,), device=device)
    images = 0.5 * torch.randn(64, 1, 16, 16, device=device)
    images[torch.arange(64), 0, :, labels] += 1  # the class is the brighter column
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")
