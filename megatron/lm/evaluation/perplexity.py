"""Bits per byte (BPB) of a text with a sliding window of the model's context length, which scores each token once.

A document's tokens follow its beginning-of-document token. The first window scores all its tokens. Each later window advances by the stride
and scores as many tokens, which have at least `window - stride + 1` tokens of context. A smaller stride gives tokens more context and takes
longer. Bytes are counted in the UTF-8 text, so that models with different tokenizers are comparable:

    bits per byte = nats of all tokens / ln 2 / bytes
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from megatron.lm.evaluation.models import Model


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """The scores of a text.

    Attributes:
        documents, tokens, bytes: counts of the text.
        nats: sum over all tokens.
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
        """Return the bits per byte of UTF-8 text."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """Return exp of the mean nats per token; infinite beyond FP64."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    def row(self) -> dict[str, Any]:
        """Return all fields and derived values by name."""
        derived = {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity, "nats_per_token": self.nats / self.tokens}
        return asdict(self) | derived


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end) of each window over `count` tokens: tokens `first` to `end` are scored with context from `begin` on. Each
    token is scored once, except for token 0, which is only context.

    Raises:
        ValueError: if the window is less than 1, or the stride is not in 1 to window.
    """
    if window < 1 or not 1 <= stride <= window:
        raise ValueError(f"stride {stride} must be between 1 and the window, {window} tokens: a larger one would skip tokens")
    first = 1
    while first < count:
        end = min(first + (window if first == 1 else stride), count)
        yield max(0, end - window - 1), first, end
        first = end


def perplexity(
    model: Model,
    documents: Iterable[str],
    *,
    stride: int,
    batch_size: int = 8,
    window: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> TextScores:
    """Score each document separately and return the result over all of them.

    Args:
        stride: tokens by which a window advances, 1 to the window.
        batch_size: windows per batch.
        window: context in tokens; None is the model's sequence length.
        progress: called after each batch with its number of scored tokens.

    Raises:
        ValueError: if there is no text, or stride or window are out of range.
    """
    window = model.seq_length if window is None else window
    if not 1 <= window <= model.seq_length:
        raise ValueError(f"window {window} must be between 1 and {model.seq_length}, the model's sequence length")
    seen = {"documents": 0, "tokens": 0, "bytes": 0}
    nats = 0.0
    cut = _cut(model, documents, window, stride, seen)
    while batch := list(islice(cut, batch_size)):
        scores = model.score([sequence for sequence, _ in batch], [start for _, start in batch])
        nats -= sum(float(score.double().sum()) for score in scores)
        progress(sum(len(score) for score in scores))
    if not seen["tokens"]:
        raise ValueError("the text is empty: there is nothing to evaluate")
    return TextScores(**seen, nats=nats, window=window, stride=stride)


def _cut(model: Model, documents: Iterable[str], window: int, stride: int, seen: dict[str, int]) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the windows of all documents, with the position from which each is scored."""
    list(windows(1, window, stride))  # checks the stride before any text is read
    for text in documents:
        tokens = [model.eod, *model.encode(text)]
        if len(tokens) == 1:
            continue
        for what, more in (("documents", 1), ("tokens", len(tokens) - 1), ("bytes", len(text.encode()))):
            seen[what] += more
        yield from ((tokens[begin:end], first - begin) for begin, first, end in windows(len(tokens), window, stride))
