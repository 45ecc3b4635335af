"""The slides' claim about an FP16 LSTM language model: most activation gradients are below 2^-24, and a loss scale recovers them.

An LSTM predicts the next byte of a text. Its gradients are small only because the loss is a mean over the bytes of a step; the loss is not
multiplied by a factor as in fp16_amp.py. It trains in FP32 (O0) and in FP16 with FP32 master weights (O2), with a loss scale of 1, 8 and
128 and with dynamic loss scaling.

- loss, valid_loss: nats per byte, at the last step and on the end of the text, which is held out from training.
- zeros: share of zeros in the gradients of the activations (embedding, LSTM and logits), over the last tenth of the steps.
- below: for FP32 only, the share of these gradients that are not zero but are below 2^-24, FP16's smallest number, after multiplication
  by the loss scale of that column.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.lm.shell.files import read_input
from msamp import amp
from msamp.fp16.opt_level import by_name
from tools.reproduce.trainings import Loop, pieces

SMALLEST = 2.0**-24  # FP16's smallest subnormal number
CASES: tuple[tuple[str, float | str], ...] = (("O0", 1.0), ("O2", 1.0), ("O2", 8.0), ("O2", 128.0), ("O2", "dynamic"))
SCALES = (1.0, 8.0, 128.0)
SEED, BYTES = 0, 256


SIZES: Mapping[str, Loop] = {  # with a constant learning rate
    "tiny": Loop(width=16, layers=1, batch=4, length=8, steps=10, lr=4e-3),
    "toy": Loop(width=48, layers=1, batch=16, length=32, steps=60, lr=4e-3),
    "full": Loop(width=1024, layers=2, batch=128, length=256, steps=500, lr=1e-3),
}


class Model(nn.Module):
    """Map bytes [b, s] to the logits of the next byte [b, s, 256]."""

    def __init__(self, shape: Loop) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.lstm = nn.LSTM(shape.width, shape.width, shape.layers, batch_first=True)
        self.head = nn.Linear(shape.width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


class Gradients:
    """Count elements, zeros, and values below `SMALLEST` at each of `SCALES` in a model's activation gradients while `counting` is set."""

    def __init__(self, model: Model) -> None:
        self.counting = False
        self.elements, self.zeros = 0, 0
        self.below = dict.fromkeys(SCALES, 0)
        for module in (model.embedding, model.lstm, model.head):
            module.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        activation = output[0] if isinstance(output, tuple) else output
        if activation.requires_grad:
            activation.register_hook(self.count)

    def count(self, g: Tensor) -> None:
        """Add one gradient to the counts."""
        if not self.counting:
            return
        self.elements += g.numel()
        self.zeros += int((g == 0).sum())
        for scale in SCALES:
            self.below[scale] += int(((g != 0) & (g.abs().double() * scale < SMALLEST)).sum())


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte."""
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(level: str, loss_scale: float | str, shape: Loop, text: Tensor, device: torch.device) -> dict[str, Any]:
    """Train one case and return its measurements."""
    torch.manual_seed(SEED)
    cut = len(text) * 19 // 20
    model = Model(shape).to(device)
    model, optimizer = amp.initialize(model, torch.optim.Adam(model.parameters(), lr=shape.lr), level, loss_scale=loss_scale)
    gradients = Gradients(model)
    for step, tokens in enumerate(pieces(text[:cut], shape, shape.steps, SEED)):
        gradients.counting = step >= shape.steps * 9 // 10
        optimizer.zero_grad()
        loss = loss_of(model, tokens.to(device))
        with amp.scaled_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    with torch.no_grad():
        valid = [float(loss_of(model, tokens.to(device))) for tokens in pieces(text[cut:], shape, 4, SEED)]
    row: dict[str, Any] = {"level": level, "loss_scale": loss_scale, "step": shape.steps, "loss": f"{float(loss.detach()):.4f}"}
    row |= {"valid_loss": f"{sum(valid) / len(valid):.4f}", "zeros": f"{gradients.zeros / gradients.elements:.4f}"}
    below = {f"below_at_{scale:g}": f"{count / gradients.elements:.4f}" for scale, count in gradients.below.items()}
    return row | ({} if by_name(level).fp16_weights else below)


def table(size: str, text: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row for each of `CASES`; `text` is uint8 [n]."""
    shape = SIZES[size]
    if len(text) * 1 // 20 < shape.length + 2:
        raise ValueError(
            f"the text has {len(text)} bytes, too few for sequences of {shape.length} (size {size}): give {20 * shape.length + 40} or more"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for level, loss_scale in CASES:
        yield train(level, loss_scale, shape, text, device)


def bytes_of(file: Path, most: int = 100_000_000) -> Tensor:
    """Return the first `most` bytes of a UTF-8 text, uint8 [n]."""
    return torch.frombuffer(bytearray(read_input(file, "a text in UTF-8").encode()[:most]), dtype=torch.uint8)
