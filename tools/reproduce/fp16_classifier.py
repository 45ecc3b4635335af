"""The slides' Table 1 in small: top-1 accuracy of an image classifier in FP32 and in FP16 mixed precision.

The slides quote ILSVRC12, whose images no package contains. Here a small network classifies noisy drawings of five shapes. It sees windows
of an image through linear layers, because FP16 convolutions are slow on a CPU, and averages over the windows. It trains in FP32 (O0) and in
FP16 with FP32 master weights and a dynamic loss scale (O2), on the same images from the same weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msamp import amp

IMAGE, WINDOW, STRIDE = 24, 12, 4  # side of an image, of a window, and distance of two windows, in pixels
SHAPES = ("square", "disc", "ring", "cross", "diamond")
NOISE = 0.6  # standard deviation; a shape is 1 on 0
BATCH, HELD_OUT = 64, 2000


def drawings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images [n, 1, 24, 24] and their shapes [n], by index in `SHAPES`."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, len(SHAPES), (count,), generator=generator)
    radius = (4 + 3 * torch.rand(count, generator=generator))[:, None, None]
    centre = 8 + (IMAGE - 16) * torch.rand(count, 2, generator=generator)
    pixels = torch.arange(IMAGE) + 0.5
    dx = (pixels - centre[:, :1]).abs()[:, None, :].expand(-1, IMAGE, -1)
    dy = (pixels - centre[:, 1:]).abs()[:, :, None].expand(-1, -1, IMAGE)
    distance = (dx.square() + dy.square()).sqrt()
    drawn = (
        torch.maximum(dx, dy) < 0.9 * radius,
        distance < radius,
        (distance < radius) & (distance > 0.55 * radius),
        (torch.minimum(dx, dy) < 0.35 * radius) & (torch.maximum(dx, dy) < radius),
        dx + dy < 1.2 * radius,
    )
    image = torch.stack(drawn, 1)[torch.arange(count), kinds].float()
    return (image + NOISE * torch.randn(image.shape, generator=generator))[:, None], kinds


class Fp16Classifier(nn.Module):
    """Map images [n, 1, 24, 24] to scores [n, 5]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.windows = nn.Sequential(nn.Linear(WINDOW * WINDOW, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, len(SHAPES))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.windows(F.unfold(images, WINDOW, stride=STRIDE).transpose(1, 2)).mean(1))
        return scores


def accuracy(level: str, seed: int, steps: int, width: int) -> float:
    """Train one classifier and return its accuracy on held-out images, in percent.

    Args:
        level: of `msamp.amp`, O0 or O2.
        seed: of weights and of training images; the held-out images are always the same.
        steps: of 64 images each.
        width: of the hidden layers.
    """
    torch.manual_seed(seed)
    model = Fp16Classifier(width)
    model, optimizer = amp.initialize(model, torch.optim.Adam(model.parameters(), lr=2e-3), level)
    for step in range(steps):
        images, kinds = drawings(BATCH, 1_000_000 * seed + step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images).float(), kinds)
        with amp.scaled_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    images, kinds = drawings(HELD_OUT, 1)
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == kinds).float().mean())
