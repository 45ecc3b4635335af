"""The FP16 claims of the slides: a detection network with and without loss scaling, FP32 weight copies, recovery from an overflow.

- detection (slides, Table 2: a single-shot detector "diverges" without loss scaling): a single-shot detector finds a square and a disc in
  small noisy images, with 256 default boxes per image. Its loss is the mean over the boxes of 64 images. With factor 1 it trains in FP16
  without loss scaling: its gradients are larger than those in the slides. The loss is therefore also multiplied by 2^-3, 2^-6 and 2^-9,
  to which Adam with eps near 0 is invariant in FP32, to find how much smaller the gradients must be until FP16 without loss scaling fails.
  Cases: FP32 (O0); FP16 with FP32 master weights (O2) without loss scaling for every factor, and with a constant and a dynamic loss scale
  for the smallest. Reported: the last loss (without the factor), mean average precision at an overlap of 1/2 on other images, and the
  share of zeros in the gradient of the first layer's output. fp16_lstm.py is a model whose own gradients are small.
- weight copy: 64 equal updates of a weight of 1; reports the share that arrives in an FP16 weight (O3) and in an FP32 master weight (O2).
- overflow: the detector at O2 with too large an initial loss scale that grows every 8 steps; reports scale and loss after each step.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msamp import amp

IMAGE, GRID, WINDOW = 32, 8, 16  # side of an image in pixels; cells per side; side of a window in pixels
SIZES = (6, 8, 10, 13)  # sides of a cell's default boxes, in pixels
FACTORS = {"1": 1.0, "2^-3": 2.0**-3, "2^-6": 2.0**-6, "2^-9": 2.0**-9}  # multiply the loss
CASES: tuple[tuple[str, float | str, str], ...] = (
    ("O0", 1.0, "1"),
    *(("O2", 1.0, factor) for factor in FACTORS),
    ("O2", 8.0, "2^-9"),
    ("O2", "dynamic", "2^-9"),
)
RATIOS = {f"2^-{k}": 2.0**-k for k in (9, 10, 11, 12, 13)}
UPDATES, TRACED = 64, 30


class Scenes(NamedTuple):
    """Images [n, 1, 32, 32] and boxes [n, 2, 4]: (centre x, centre y, width, height) of the square and the disc, as fractions of a side."""

    images: Tensor
    boxes: Tensor


def scenes(count: int, seed: int) -> Scenes:
    """Return `count` images with Gaussian noise of standard deviation 0.2."""
    generator = torch.Generator().manual_seed(seed)
    radius = 3 + 4 * torch.rand(count, 2, generator=generator)
    centre = 7 + (IMAGE - 14) * torch.rand(count, 2, 2, generator=generator)
    pixels = torch.arange(IMAGE) + 0.5
    dx, dy = (pixels - centre[..., :1, None]).abs(), (pixels[:, None] - centre[..., 1:, None]).abs()
    square = torch.maximum(dx, dy)[:, 0] < radius[:, :1, None]
    disc = (dx.square() + dy.square())[:, 1] < radius[:, 1:, None].square()
    images = square.float() + disc.float() + 0.2 * torch.randn(count, IMAGE, IMAGE, generator=generator)
    return Scenes(images[:, None], torch.cat([centre, 2 * radius[..., None].expand(-1, -1, 2)], -1) / IMAGE)


def default_boxes() -> Tensor:
    """Return the default boxes, [256, 4]; the boxes of a cell are adjacent."""
    y, x = torch.meshgrid(*[(torch.arange(GRID) + 0.5) / GRID] * 2, indexing="ij")
    sizes = torch.tensor(SIZES) / IMAGE
    centres = torch.stack([x, y], -1).view(-1, 1, 2).expand(-1, len(SIZES), -1)
    return torch.cat([centres, sizes.view(1, -1, 1).expand(GRID * GRID, -1, 2)], -1).reshape(-1, 4)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of boxes [..., 4]."""
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    both = (high - low).clamp(min=0).prod(-1)
    return both / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - both)


class Detector(nn.Module):
    """Predict for every default box the scores of background, square and disc, and 4 offsets; returns [n, 256, 7]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (WINDOW * WINDOW, width, width, width)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, len(SIZES) * 7))

    def forward(self, images: Tensor) -> Tensor:
        step = IMAGE // GRID
        windows = F.unfold(images, WINDOW, padding=(WINDOW - step) // 2, stride=step)  # a GEMM: FP16 convolutions are slow on CPUs
        predictions: Tensor = self.layers(windows.transpose(1, 2)).view(len(images), -1, 7)
        return predictions


def loss_of(predictions: Tensor, boxes: Tensor) -> Tensor:
    """Return the mean over all default boxes of the cross entropy plus, for matched boxes, the smooth L1 loss of the offsets.

    A box is matched if it overlaps an object by half or more than any other box does.
    """
    default = default_boxes()
    shares = overlap(default[None, :, None], boxes[:, None])
    match = torch.where(shares.amax(2) >= 0.5, shares.argmax(2) + 1, 0)
    match = match.scatter(1, shares.argmax(1), torch.tensor([1, 2]).expand(len(boxes), -1))
    target = boxes.gather(1, (match - 1).clamp(min=0)[..., None].expand(-1, -1, 4))
    offsets = torch.cat([(target[..., :2] - default[:, :2]) / default[:, 2:] * 10, (target[..., 2:] / default[:, 2:]).log() * 5], -1)
    located = F.smooth_l1_loss(predictions[..., 3:], offsets, reduction="none").sum(-1)
    return F.cross_entropy(predictions[..., :3].flatten(0, 1), match.flatten()) + (located * (match > 0)).mean()


@torch.no_grad()
def average_precision(predictions: Tensor, boxes: Tensor) -> float:
    """Return the mean average precision over the two classes; an image's best box is a hit if it overlaps the object by half.

    Every image contains one object of each class.
    """
    default, total = default_boxes(), 0.0
    for kind in (0, 1):
        scores, best = predictions[..., :3].softmax(-1)[..., kind + 1].max(1)
        offsets, box = predictions[torch.arange(len(predictions)), best, 3:], default[best]
        predicted = torch.cat([box[:, :2] + offsets[:, :2] * box[:, 2:] / 10, box[:, 2:] * (offsets[:, 2:] / 5).exp()], -1)
        hits = (overlap(predicted, boxes[:, kind]) >= 0.5)[scores.argsort(descending=True)].double()
        total += float((hits.cumsum(0) / torch.arange(1, len(hits) + 1) * hits).mean())
    return total / 2


def training(level: str, steps: int, factor: float, **options: Any) -> Iterator[tuple[Detector, float, float, float]]:
    """Yield after each step the model, the loss without `factor`, the share of zeros in the first layer's gradient, and the loss scale."""
    torch.manual_seed(0)
    batches = [scenes(64, 1000 + i) for i in range(16)]
    model = Detector()
    model, optimizer = amp.initialize(model, torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-15), level, **options)
    zeros: list[float] = []

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: zeros.append(float((g == 0).float().mean())))

    model.layers[0].register_forward_hook(watch)
    for step in range(steps):
        images, boxes = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = loss_of(model(images), boxes)
        with amp.scaled_loss(loss * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        yield model, float(loss.detach()), zeros[-1], amp.state_dict(optimizer)["loss_scaler0"]["loss_scale"]


def detection(steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each of CASES."""
    images, boxes = scenes(256, 7)
    for level, loss_scale, factor in CASES:
        *_, (model, loss, zeros, _) = training(level, steps, FACTORS[factor], loss_scale=loss_scale)
        precision = average_precision(model(images), boxes)
        row = {"level": level, "factor": factor, "loss_scale": loss_scale, "step": steps, "loss": f"{loss:.4f}"}
        yield row | {"average_precision": f"{precision:.3f}", "zeros": f"{zeros:.3f}"}


def weight_copies() -> Iterator[dict[str, Any]]:
    """Yield the share of UPDATES equal updates that arrives in an FP16 weight and in an FP32 master weight."""
    for name, ratio in RATIOS.items():
        for level in ("O3", "O2"):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=ratio), level, loss_scale=8.0)
            for _ in range(UPDATES):
                optimizer.zero_grad()
                with amp.scaled_loss(-model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:  # a gradient of -1
                    scaled_loss.backward()
                optimizer.step()
            (weight,) = amp.master_params(optimizer)
            arrived = (float(weight.detach()) - 1) / (UPDATES * ratio)
            yield {"level": level, "update_over_value": name, "arrived": f"{arrived:.3f}"}


def overflow() -> Iterator[dict[str, Any]]:
    """Yield a row for each of TRACED steps; the loss scale halves in a skipped step."""
    steps = training("O2", TRACED, FACTORS["2^-9"], init_scale=2.0**34, max_loss_scale=2.0**34, growth_interval=8)
    for step, (_, loss, _, scale) in enumerate(steps):
        yield {"loss_scale": f"2^{math.log2(scale):g}", "step": step + 1, "loss": f"{loss:.4f}"}
