"""What the slides say of FP16: a detection network with and without loss scaling, FP32 weight copies, recovery from an overflow.

    python tools/reproduce/fp16_amp.py --csv tools/reproduce/results/fp16_amp.csv      # on a CPU, 2 minutes

- detection (slides, Table 2: a single-shot detector "diverges" without loss scaling): a single-shot detector of windows finds a square
  and a disc in small noisy images, 256 default boxes an image. Its loss is the mean over the boxes of 64 images. By itself (factor 1) it
  trains in FP16 without loss scaling: its gradients are not as small as the slides say of real ones. So the loss is also multiplied by
  2^-3, 2^-6 and 2^-9, which Adam without eps does not see in FP32, and which says how much smaller the gradients have to be until FP16
  without loss scaling fails. In FP32 (O0) and in FP16 with FP32 masters (O2) without a loss scale for every factor, with a constant and
  with a dynamic one for the smallest: last loss (without the factor), mean average precision at an overlap of 1/2 on other images, and the
  share of zeros in the gradient of the first layer's output. A model with small gradients of its own: fp16_lstm.py.
- weight copy: the same update 64 times, of a weight of 1: the share of it that arrives in an FP16 weight (O3) and in an FP32 master (O2).
- overflow: the detector at O2 from a loss scale that is too large, growing every 8 steps: scale and loss after each step.

Rows are appended to the CSV.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file
from msamp import amp
from tools.bench import rows

IMAGE, GRID, WINDOW = 32, 8, 16  # pixels of an image's side; cells of a side; pixels of a window's side
SIZES = (6, 8, 10, 13)  # of the default boxes of a cell, pixels
FACTORS = {"1": 1.0, "2^-3": 2.0**-3, "2^-6": 2.0**-6, "2^-9": 2.0**-9}  # of the loss
CASES: tuple[tuple[str, float | str, str], ...] = (
    ("O0", 1.0, "1"),
    *(("O2", 1.0, factor) for factor in FACTORS),
    ("O2", 8.0, "2^-9"),
    ("O2", "dynamic", "2^-9"),
)
RATIOS = {f"2^-{k}": 2.0**-k for k in (9, 10, 11, 12, 13)}
UPDATES, TRACED = 64, 30
COLUMNS = ("what", "level", "factor", "loss_scale", "step", "loss", "average_precision", "zeros", "update_over_value", "arrived")


class Scenes(NamedTuple):
    """Images [n, 1, 32, 32], and of the square and the disc in each (centre x, centre y, width, height) [n, 2, 4] in shares of a side."""

    images: Tensor
    boxes: Tensor


def scenes(count: int, seed: int) -> Scenes:
    """Some images with noise of 0.2."""
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
    """[256, 4], those of a cell side by side."""
    y, x = torch.meshgrid(*[(torch.arange(GRID) + 0.5) / GRID] * 2, indexing="ij")
    sizes = torch.tensor(SIZES) / IMAGE
    centres = torch.stack([x, y], -1).view(-1, 1, 2).expand(-1, len(SIZES), -1)
    return torch.cat([centres, sizes.view(1, -1, 1).expand(GRID * GRID, -1, 2)], -1).reshape(-1, 4)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes [.., 4]."""
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    both = (high - low).clamp(min=0).prod(-1)
    return both / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - both)


class Detector(nn.Module):
    """Every default box of every image: scores of background, square and disc, and 4 offsets; [n, 256, 7]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (WINDOW * WINDOW, width, width, width)
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, len(SIZES) * 7))

    def forward(self, images: Tensor) -> Tensor:
        step = IMAGE // GRID
        windows = F.unfold(images, WINDOW, padding=(WINDOW - step) // 2, stride=step)  # convolutions as a GEMM: FP16's are slow on CPUs
        found: Tensor = self.layers(windows.transpose(1, 2)).view(len(images), -1, 7)
        return found


def loss_of(found: Tensor, boxes: Tensor) -> Tensor:
    """Mean over all default boxes: cross entropy, and of those that overlap an object by half (or most) smooth L1 of the offsets."""
    default = default_boxes()
    shares = overlap(default[None, :, None], boxes[:, None])
    match = torch.where(shares.amax(2) >= 0.5, shares.argmax(2) + 1, 0)
    match = match.scatter(1, shares.argmax(1), torch.tensor([1, 2]).expand(len(boxes), -1))
    target = boxes.gather(1, (match - 1).clamp(min=0)[..., None].expand(-1, -1, 4))
    offsets = torch.cat([(target[..., :2] - default[:, :2]) / default[:, 2:] * 10, (target[..., 2:] / default[:, 2:]).log() * 5], -1)
    located = F.smooth_l1_loss(found[..., 3:], offsets, reduction="none").sum(-1)
    return F.cross_entropy(found[..., :3].flatten(0, 1), match.flatten()) + (located * (match > 0)).mean()


@torch.no_grad()
def average_precision(found: Tensor, boxes: Tensor) -> float:
    """Mean over the two kinds, each of which is once in every image: its best box counts where it overlaps the object by half."""
    default, total = default_boxes(), 0.0
    for kind in (0, 1):
        scores, best = found[..., :3].softmax(-1)[..., kind + 1].max(1)
        offsets, box = found[torch.arange(len(found)), best, 3:], default[best]
        predicted = torch.cat([box[:, :2] + offsets[:, :2] * box[:, 2:] / 10, box[:, 2:] * (offsets[:, 2:] / 5).exp()], -1)
        hits = (overlap(predicted, boxes[:, kind]) >= 0.5)[scores.argsort(descending=True)].double()
        total += float((hits.cumsum(0) / torch.arange(1, len(hits) + 1) * hits).mean())
    return total / 2


def training(level: str, steps: int, factor: float, **options: Any) -> Iterator[tuple[Detector, float, float, float]]:
    """After each step: the model, the loss before `factor`, the share of zeros in the first layer's gradient, the loss scale."""
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
    """A row for each of CASES."""
    images, boxes = scenes(256, 7)
    for level, loss_scale, factor in CASES:
        *_, (model, loss, zeros, _) = training(level, steps, FACTORS[factor], loss_scale=loss_scale)
        precision = average_precision(model(images), boxes)
        row = {"what": "detection", "level": level, "factor": factor, "loss_scale": loss_scale, "step": steps, "loss": f"{loss:.4f}"}
        yield row | {"average_precision": f"{precision:.3f}", "zeros": f"{zeros:.3f}"}


def weight_copies() -> Iterator[dict[str, Any]]:
    """What arrives of UPDATES updates of the same size, in an FP16 weight and in an FP32 master."""
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
            yield {"what": "weight copy", "level": level, "update_over_value": name, "arrived": f"{arrived:.3f}"}


def overflow() -> Iterator[dict[str, Any]]:
    """A row for each of TRACED steps; a step after which the scale is half of what it was has been skipped."""
    steps = training("O2", TRACED, FACTORS["2^-9"], init_scale=2.0**34, max_loss_scale=2.0**34, growth_interval=8)
    for step, (_, loss, _, scale) in enumerate(steps):
        yield {
            "what": "overflow",
            "level": "O2",
            "factor": "2^-9",
            "loss_scale": f"2^{math.log2(scale):g}",
            "step": step + 1,
            "loss": f"{loss:.4f}",
        }


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=count(1), default=300, help="of the detector (default: %(default)s)")
    parser.add_argument("--csv", type=output_file, help="file to append the rows to")
    options = parser.parse_args(arguments)
    lines = [dict.fromkeys(COLUMNS, "") | row for part in (detection(options.steps), weight_copies(), overflow()) for row in part]
    if options.csv:
        rows.append(options.csv, [line | rows.machine() | {"gpu": "cpu"} for line in lines])
    widths = {name: max(len(name), *(len(str(line[name])) for line in lines)) for name in COLUMNS}
    for line in [dict(zip(COLUMNS, COLUMNS, strict=True)), *lines]:
        print("  ".join(str(line[name]).rjust(widths[name]) for name in COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
