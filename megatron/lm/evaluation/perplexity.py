"""Bits a byte of a text: a window of the model's length slides over it, and each token is told once.

A document's tokens stand behind the token that begins one. The first window tells all its tokens; each later one moves on by the stride and
tells as many, which have at least `window - stride + 1` tokens before them. A small stride gives each token more to go by, and takes
longer. Bytes are those of the text in UTF-8, so that models of different tokenizers compare:

    bits a byte = nats of all tokens / ln 2 / bytes
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from megatron.lm.evaluation.models import Model


@dataclass(frozen=True, kw_only=True)
class Told:
    """The outcome.

    Attributes:
        documents, tokens, bytes: of the text.
        nats: of all tokens together.
        window, stride: in tokens.
    """

    documents: int
    tokens: int
    bytes: int
    nats: float
    window: int
    stride: int

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of UTF-8 text."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """exp of the mean nats a token; infinite beyond FP64."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    def row(self) -> dict[str, Any]:
        """All of it, by name."""
        derived = {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity, "nats_per_token": self.nats / self.tokens}
        return asdict(self) | derived


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, told, end) of each window over `count` tokens, the first of which is only context: tokens `told` to `end` are told by those
    from `begin` on. Each token but the first is told once.

    Raises:
        ValueError: window below 1, or a stride outside 1 to window.
    """
    if window < 1 or not 1 <= stride <= window:
        raise ValueError(f"stride {stride} must lie between 1 and the window, {window} tokens: a larger one would leave tokens out")
    told = 1
    while told < count:
        end = min(told + (window if told == 1 else stride), count)
        yield max(0, end - window - 1), told, end
        told = end


def perplexity(
    model: Model,
    documents: Iterable[str],
    *,
    stride: int,
    batch_size: int = 8,
    window: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Told:
    """Tell each document by itself.

    Args:
        stride: tokens that a window moves on by, 1 to the window.
        batch_size: windows that run side by side.
        window: tokens that the model sees; its sequence length where None.
        progress: is called with the tokens of each batch when they are told.

    Raises:
        ValueError: no text, or a stride or window out of range.
    """
    window = model.seq_length if window is None else window
    if not 1 <= window <= model.seq_length:
        raise ValueError(f"window {window} must lie between 1 and {model.seq_length}, the model's sequence length")
    seen = {"documents": 0, "tokens": 0, "bytes": 0}
    nats = 0.0
    cut = _cut(model, documents, window, stride, seen)
    while batch := list(islice(cut, batch_size)):
        scores = model.score([sequence for sequence, _ in batch], [start for _, start in batch])
        nats -= sum(float(score.logprobs.double().sum()) for score in scores)
        progress(sum(len(score.logprobs) for score in scores))
    if not seen["tokens"]:
        raise ValueError("the text is empty: there is nothing to tell")
    return Told(**seen, nats=nats, window=window, stride=stride)


def _cut(model: Model, documents: Iterable[str], window: int, stride: int, seen: dict[str, int]) -> Iterator[tuple[Sequence[int], int]]:
    """Windows of all documents, and from where on each is told."""
    list(windows(1, window, stride))  # refuses the stride before anything is read
    for text in documents:
        tokens = [model.eod, *model.encode(text)]
        if len(tokens) == 1:
            continue
        for what, more in (("documents", 1), ("tokens", len(tokens) - 1), ("bytes", len(text.encode()))):
            seen[what] += more
        yield from ((tokens[begin:end], told - begin) for begin, told, end in windows(len(tokens), window, stride))
