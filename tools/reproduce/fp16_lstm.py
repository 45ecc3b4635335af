"""What the slides say of FP16 and an LSTM language model: most activation gradients lie below 2^-24, and a loss scale brings them back.

    python tools/reproduce/fp16_lstm.py --text enwik8.txt                 # on a CPU, minutes: FP16 is slow there
    python tools/reproduce/fp16_lstm.py --text enwik8.txt --size full     # 2 layers of 1,024, on a GPU, minutes

An LSTM reads bytes and predicts the next. Nothing makes its gradients small but the mean over the bytes of a step: there is no factor as in
the detector of fp16_amp.py. It trains in FP32 (O0), and in FP16 with FP32 masters (O2) at a loss scale of 1, 8, 128, and dynamic.

- loss, valid_loss: nats a byte, of the last step, and on the end of the text, which is not trained on.
- zeros: share of zeros in the gradients of the activations (of embedding, LSTM and logits), over the last tenth of the steps.
- below: in FP32 alone, the share of these gradients that are not zero and lie below 2^-24, FP16's smallest number, once multiplied by the
  loss scale of that column.

Rows are appended to the CSV.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, output_file, path
from megatron.lm.shell.files import read_text
from msamp import amp
from msamp.fp16.opt_level import by_name
from tools.bench import rows

SMALLEST = 2.0**-24  # FP16's smallest subnormal number
CASES: tuple[tuple[str, float | str], ...] = (("O0", 1.0), ("O2", 1.0), ("O2", 8.0), ("O2", 128.0), ("O2", "dynamic"))
SCALES = (1.0, 8.0, 128.0)
COLUMNS = ("what", "size", "level", "loss_scale", "step", "loss", "valid_loss", "zeros", *(f"below_at_{scale:g}" for scale in SCALES))
SEED, BYTES = 0, 256


@dataclass(frozen=True)
class Shape:
    """A size of the experiment: the model, and what it reads in a step."""

    width: int
    layers: int
    batch: int
    length: int
    steps: int
    lr: float


SIZES: Mapping[str, Shape] = {
    "tiny": Shape(width=16, layers=1, batch=4, length=8, steps=10, lr=4e-3),
    "toy": Shape(width=48, layers=1, batch=16, length=32, steps=60, lr=4e-3),
    "full": Shape(width=1024, layers=2, batch=128, length=256, steps=500, lr=1e-3),
}


class Model(nn.Module):
    """Bytes [b, s] -> scores of the next byte [b, s, 256]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.lstm = nn.LSTM(shape.width, shape.width, shape.layers, batch_first=True)
        self.head = nn.Linear(shape.width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return found


class Gradients:
    """Counts over the gradients of a model's activations while `counting`: elements, zeros, and below `SMALLEST` at each of `SCALES`."""

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
        """Take in one gradient."""
        if not self.counting:
            return
        self.elements += g.numel()
        self.zeros += int((g == 0).sum())
        for scale in SCALES:
            self.below[scale] += int(((g != 0) & (g.abs().double() * scale < SMALLEST)).sum())


def windows(text: Tensor, shape: Shape, steps: int) -> Iterator[Tensor]:
    """Random pieces of the text, the same of the same seed: [batch, length + 1] for each step."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - shape.length - 1, (shape.batch, 1), generator=generator)
        yield text[starts + torch.arange(shape.length + 1)].long()


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    """Nats a byte."""
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(level: str, loss_scale: float | str, shape: Shape, text: Tensor, device: torch.device) -> dict[str, Any]:
    """The measures of one case."""
    torch.manual_seed(SEED)
    cut = len(text) * 19 // 20
    model = Model(shape).to(device)
    model, optimizer = amp.initialize(model, torch.optim.Adam(model.parameters(), lr=shape.lr), level, loss_scale=loss_scale)
    gradients = Gradients(model)
    for step, tokens in enumerate(windows(text[:cut], shape, shape.steps)):
        gradients.counting = step >= shape.steps * 9 // 10
        optimizer.zero_grad()
        loss = loss_of(model, tokens.to(device))
        with amp.scaled_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    with torch.no_grad():
        valid = [float(loss_of(model, tokens.to(device))) for tokens in windows(text[cut:], shape, 4)]
    row: dict[str, Any] = {"level": level, "loss_scale": loss_scale, "step": shape.steps, "loss": f"{float(loss.detach()):.4f}"}
    row |= {"valid_loss": f"{sum(valid) / len(valid):.4f}", "zeros": f"{gradients.zeros / gradients.elements:.4f}"}
    below = {f"below_at_{scale:g}": f"{count / gradients.elements:.4f}" for scale, count in gradients.below.items()}
    return row | ({} if by_name(level).fp16_weights else below)


def table(size: str, text: Tensor) -> Iterator[dict[str, Any]]:
    """A row for each of `CASES`; `text`: bytes."""
    shape = SIZES[size]
    if len(text) * 1 // 20 < shape.length + 2:
        raise ValueError(
            f"the text has {len(text)} bytes, and size {size} reads {shape.length} in a row: give {20 * shape.length + 40} or more"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for level, loss_scale in CASES:
        row = {"what": "LSTM language model", "size": size} | train(level, loss_scale, shape, text, device)
        yield dict.fromkeys(COLUMNS, "") | row


def bytes_of(file: Path, most: int = 100_000_000) -> Tensor:
    """The beginning of a text in UTF-8, uint8 [n]."""
    return torch.frombuffer(bytearray(read_text(file, "a text in UTF-8").encode()[:most]), dtype=torch.uint8)


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--text", type=path, required=True, help="what it reads: a text in UTF-8")
    parser.add_argument("--size", choices=list(SIZES), default="toy", help="(default: %(default)s)")
    parser.add_argument("--csv", type=output_file, help="file to append the rows to")
    options = parser.parse_args(arguments)
    for line in table(options.size, bytes_of(options.text)):
        print("  ".join(f"{name} {line[name]}" for name in COLUMNS if line[name] != ""), flush=True)
        if options.csv:
            rows.append(options.csv, [line | rows.machine()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
