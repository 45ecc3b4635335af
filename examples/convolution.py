"""A small convolutional network at O2: python examples/convolution.py

Convolutions stay as they are, and the linear layers after them run in FP8. `msamp.survey` reports how much of the network that is. The
same network in FP32 trains on the same images.
"""

import copy

import torch
from torch import nn

import msamp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 16),
).to(device)  # fmt: skip
plain = copy.deepcopy(model)
plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-3)
model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe="O2")
print(msamp.survey(model))

for step in range(61):
    labels = torch.randint(16, (64,), device=device)
    images = 0.5 * torch.randn(64, 1, 16, 16, device=device)
    images[torch.arange(64), 0, :, labels] += 1  # the class is the brighter column
    losses = []
    for network, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step:2}  loss {losses[0]:.4f}  in FP32 {losses[1]:.4f}")
