"""Small training runs for tables that need one: the trainer on a text byte by byte, and Collage's optimizer in its own loop."""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT
from megatron.lm.tools.report import Run, read_run
from msamp.optim.collage import collage_adamw, update_quality
from msamp.optim.optimizer import LowPrecisionOptimizer
from tools.reproduce.compare_precisions import Job, cards, complete, train

ENWIK8 = "data/enwik8"  # relative to the root: written by `msamp prepare-text enwik8`
# GPT-2's files require a merge: this one joins two bytes that never occur in UTF-8.
MERGE = ("\u00fe", "\u00ff")
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's vocabulary represents by themselves


def byte_symbols() -> dict[str, int]:
    """Return the ids of GPT-2's symbols of all bytes, of `MERGE`, and of the end of a text."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    symbols = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + position) for position, byte in enumerate(others)}
    return {symbols[byte]: byte for byte in range(256)} | {"".join(MERGE): 256, END_OF_TEXT: 257}


def byte_data(text: Path, folder: Path) -> Path:
    """Return a folder as written by `msamp prepare-text`, with a text's bytes as tokens; the last twentieth is for
    validation."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            _write_bytes(text, written := Path(aside) / "bytes")
            try:
                written.rename(folder)
            except OSError:
                if not folder.exists():  # else another run created it first
                    raise
    return folder


def _write_bytes(text: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "encoder.json").write_text(json.dumps(byte_symbols()), encoding="utf-8")
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{' '.join(MERGE)}\n", encoding="utf-8")
    words = text.read_text(encoding="utf-8")
    cut = len(words) * 19 // 20
    data = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "encoder.json"), merge_file=str(folder / "vocab.bpe"))
    for name, part in (("train", words[:cut]), ("valid", words[cut:])):
        documents = [Document(texts={"text": part}, source_bytes=len(part.encode()))]
        write_datasets(documents, {"text": folder / f"{name}_text_document"}, EncodeOptions(data=data), workers=0)


def trained(case: str, seed: int, steps: int, flags: str, data: Path, folder: Path, processes: int = 1) -> Run:
    """Run `megatron.lm.pretrain` in its own processes, on the first GPUs if there are any; a run that already finished is only read.

    Args:
        case: a precision, followed by flags.
        flags: more flags, which take precedence.
        data: folder that `msamp prepare-text` wrote.
        folder: for the metrics.
        processes: of the run, data-parallel unless the flags say otherwise.

    Raises:
        RuntimeError: the run failed; with the end of its log.
    """
    job = Job(precision=case, seed=seed, steps=steps, name=f"{'-'.join(case.split())}_{seed}_{steps}", processes=processes)
    options = argparse.Namespace(data=str(data), out=folder, flags=flags)
    train(job, options, cards(processes)[0])
    if not complete(job, options):
        log = (folder / job.name / "log.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{case}, seed {seed}, failed:\n{log[-2000:]}")
    return read_run(job.name, folder / job.name / "metrics.jsonl")


# ------------------------------------------------------------------------------------------------------------------ Collage's loop


@dataclass(frozen=True)
class Loop:
    """Size of a training run in its own loop, on bytes."""

    width: int
    layers: int
    length: int
    batch: int
    steps: int
    lr: float = 1e-3
    warm_up: int = 20

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1: warm-up, then a cosine to a tenth."""
        ahead = max(0.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        return self.lr * min(1.0, step / self.warm_up) * (0.55 + 0.45 * math.cos(math.pi * ahead))


class Bytes(nn.Module):
    """A GPT on bytes: pre-norm layers of attention and GELU, learned positions, tied head; [b, s] -> [b, s, 256]."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, loop.width), nn.Embedding(loop.length, loop.width)
        layer = nn.TransformerEncoderLayer(
            loop.width, max(1, loop.width // 32), 4 * loop.width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, loop.layers, nn.LayerNorm(loop.width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(loop.length), persistent=False)
        for weights in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weights, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        return F.linear(self.layers(x, mask=self.mask, is_causal=True), self.embedding.weight)


def pieces(text: Tensor, loop: Loop, count: int, seed: int) -> Iterator[Tensor]:
    """Yield random pieces of a text, [batch, length + 1]; the same pieces for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - loop.length - 1, (loop.batch, 1), generator=generator)
        yield text[starts + torch.arange(loop.length + 1)].long()


def loss_of(model: nn.Module, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the loss of the model with these weights, in nats per byte."""
    scores = torch.func.functional_call(model, dict(weights), (tokens[:, :-1],))
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


FP32 = "fp32"  # "the 32-bit counterpart of option A" of Collage's Figure 3: weights, gradients and moments in FP32


def collage(
    variant: str, beta2: float, loop: Loop, text: Tensor, seed: int, every: int = 10, build: Callable[[Loop], nn.Module] = Bytes
) -> Iterator[dict[str, Any]]:
    """Train with one option of Collage: BF16 weights and gradients, products in FP32, so that the optimizer alone differs.

    Args:
        variant: an option of `msamp.optim.collage`, or `FP32`.
        beta2, loop, seed: of the training run.
        text: bytes, uint8; the last twentieth is held out.
        every: steps between two rows.
        build: makes the model, which maps [b, s] bytes to [b, s, 256].

    Yields:
        every `every` steps and after the last: step, loss (mean since the last row), norm of the weights; of Collage's options also edq,
        update_norm and lost; the last also valid_loss.
    """
    torch.manual_seed(seed)
    model, dtype = build(loop), torch.float32 if variant == FP32 else torch.bfloat16
    weights = {name: nn.Parameter(p.detach().to(dtype, copy=True)) for name, p in model.named_parameters()}
    settings: dict[str, Any] = {"lr": loop.lr, "betas": (0.9, beta2), "weight_decay": 0.1}
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(weights.values(), **settings) if variant == FP32 else collage_adamw(weights.values(), variant=variant, **settings)
    )
    cut = len(text) * 19 // 20
    losses: list[float] = []
    for step, tokens in enumerate(pieces(text[:cut], loop, loop.steps, seed), 1):
        for group in optimizer.param_groups:
            group["lr"] = loop.lr_at(step)
        wide = {name: p.detach().float().requires_grad_() for name, p in weights.items()}
        loss = loss_of(model, wide, tokens)
        for p, g in zip(weights.values(), torch.autograd.grad(loss, list(wide.values())), strict=True):
            p.grad = g.to(dtype)
        report = step % every == 0 or step == loop.steps
        quality = update_quality(optimizer) if report and isinstance(optimizer, LowPrecisionOptimizer) else None
        optimizer.step()
        losses.append(float(loss.detach()))
        if report:
            row = {"step": step, "loss": sum(losses) / len(losses)}
            if quality is not None:
                row |= {"edq": quality.edq, "update_norm": quality.norm, "lost": quality.lost_frac}
            row["norm"] = math.sqrt(sum(float(p.detach().double().square().sum()) for p in weights.values()))
            losses = []
            if step == loop.steps:
                wide = {name: p.detach().float() for name, p in weights.items()}
                with torch.no_grad():
                    valid = [float(loss_of(model, wide, tokens)) for tokens in pieces(text[cut:], loop, 8, 0)]
                row["valid_loss"] = sum(valid) / len(valid)
            yield row
