"""Generate continuations of prompts: sample token by token from a `Decoder`, independent of the batch.

decoder = Decoder(model, capacity=config.model.seq_length)
for continuation in generate(decoder, prompts, 64, Sampling(temperature=0.8, top_k=40), eod=tokenizer.eod).tokens: ...
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MOST_TOKENS = 10**4  # per call
_DIVERGED = "the model's logits are NaN or infinite: it has diverged, load an older checkpoint"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of the next token.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: sample from this many most likely tokens; 0 is all.
        top_p: sample from the most likely tokens with this total probability; 1 is all.
        seed: of the first sequence; sequence i uses seed + i, so its sample does not depend on the batch.

    Raises:
        ValueError: if a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be finite and 0 or more: 0 is greedy decoding")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be 0 or more: 0 samples from all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be greater than 0 and at most 1: 1 samples from all tokens")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} must be between -2^63 and 2^63 - 1")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1):
            raise ValueError(
                f"temperature 0 is greedy decoding, so top-k {self.top_k} and top-p {self.top_p} have no effect: leave them out"
            )


class Steps(Protocol):
    """The interface of a `Decoder` that `generate` uses."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after the last token of each sequence, FP32 [b, vocabulary]."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens [b] int64 and return the logits after them, FP32 [b, vocabulary]."""


@dataclass
class Generated:
    """The result of `generate`.

    Attributes:
        tokens: the continuation of each prompt, without the prompt and the end-of-document token.
        logprobs: of each of its tokens, in nats, with the temperature (1 for greedy decoding) but before top-k and top-p.
        ended: whether it ended with the end of document or because of `stopped`.
        prompt_tokens, prompt_seconds, new_tokens, new_seconds: token counts and times of prompts and of generation.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ended: list[bool]
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0

    @property
    def speed(self) -> str:
        """Return a line with the tokens read and generated, and tokens/s."""
        read = self.prompt_tokens / max(self.prompt_seconds, 1e-9)
        rate = self.new_tokens / max(self.new_seconds, 1e-9)
        return (
            f"{self.prompt_tokens} tokens of {len(self.tokens)} prompts in {self.prompt_seconds:.2f} s ({read:.0f} tokens/s), "
            f"{self.new_tokens} tokens generated in {self.new_seconds:.2f} s ({rate:.1f} tokens/s)"
        )


@torch.no_grad()
def generate(
    decoder: Steps,
    prompts: Sequence[Sequence[int]],
    n: int,
    sampling: Sampling,
    *,
    seq_length: int,
    vocab_size: int,
    eod: int | None = None,
    stopped: Callable[[list[int]], bool] | None = None,
) -> Generated:
    """Append up to `n` tokens to each prompt, all prompts in one batch.

    A sequence that would exceed `seq_length` drops the older half of its context and continues from the rest.

    Args:
        prompts: token ids, each at least one and at most `seq_length`.
        n: tokens to append; fewer if the end of document comes first.
        seq_length: the model's context length, which is the decoder's capacity.
        vocab_size: columns of the logits beyond it are padding and never sampled.
        eod: token that ends a continuation, or None.
        stopped: called with a continuation after each token; returns whether it ends there.

    Raises:
        ValueError: if there is no prompt, one is empty or longer than `seq_length`, `n` is out of range, or logits are non-finite.
    """
    _check(prompts, n, seq_length)
    generated = Generated([[] for _ in prompts], [[] for _ in prompts], [False] * len(prompts))
    if n == 0:
        return generated
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    contexts = [list(prompt) for prompt in prompts]
    generated.prompt_tokens, start = sum(map(len, prompts)), time.perf_counter()
    logits = decoder.prefill(contexts)
    generated.prompt_seconds, start = _elapsed(logits, start), time.perf_counter()
    for left in reversed(range(n)):
        uniforms = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
        drawn, logprobs, finite = _drawn(logits[:, :vocab_size], sampling, uniforms)
        # One host sync per token. FP64 represents token ids and FP32 values exactly.
        values = torch.stack([drawn.double(), logprobs.double(), finite.double()]).tolist()
        if not all(values[2]):
            raise ValueError(_DIVERGED)
        for row, (token, logprob) in enumerate(zip(map(int, values[0]), values[1], strict=True)):
            contexts[row].append(token)
            if generated.ended[row]:
                continue
            generated.ended[row] = token == eod
            if token != eod:
                generated.tokens[row].append(token)
                generated.logprobs[row].append(logprob)
                generated.ended[row] = stopped is not None and stopped(generated.tokens[row])
            generated.new_tokens += 1
        if not left or all(generated.ended):
            break
        if max(map(len, contexts)) > seq_length:
            contexts = [context[-((seq_length + 1) // 2) :] if len(context) > seq_length else context for context in contexts]
            logits = decoder.prefill(contexts)
        else:
            logits = decoder.step(drawn)
    generated.new_seconds = _elapsed(logits, start)
    return generated


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: [b, vocabulary] FP32.
        uniforms: FP64 [b] in [0, 1): the random number of each row, compared with the cumulative probabilities in descending order.

    Returns:
        Tokens int64 [b], and their log-probabilities, FP32 [b] (`Generated.logprobs`).

    Raises:
        ValueError: if logits are NaN or infinite.
    """
    drawn, logprobs, finite = _drawn(logits, sampling, uniforms)
    if not bool(finite.all()):
        raise ValueError(_DIVERGED)
    return drawn, logprobs


def _drawn(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Like `draw`, but also return whether a row's logits are finite, bool [b], instead of raising (its token is then arbitrary). No host
    sync."""
    finite = logits.isfinite().all(-1)
    greedy = sampling.temperature == 0
    count = 1 if greedy else min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, indices = logits.topk(count, dim=-1)
    # Relative to the likeliest and in FP64, so that a small temperature cannot give Inf - Inf.
    top = values[:, :1].double()
    temperature = 1.0 if greedy else sampling.temperature
    everything = ((logits.double() - top) / temperature).logsumexp(-1, keepdim=True)
    logprobs = (values.double() - top) / temperature - everything
    if greedy:
        return indices[:, 0], logprobs[:, 0].float(), finite
    shares = logprobs.exp()
    shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill(before >= sampling.top_p, 0.0)  # always keeps the likeliest, which has 0 before it
    cumulated = shares.cumsum(-1)
    uniforms = uniforms.to(logits.device, non_blocking=True)
    places = torch.searchsorted(cumulated, (uniforms * cumulated[:, -1]).unsqueeze(-1), right=True)
    places = places.clamp(max=(shares > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # if a draw rounds up to the sum, or shares are NaN
    return indices.gather(-1, places)[:, 0], logprobs.gather(-1, places)[:, 0].float(), finite


def _check(prompts: Sequence[Sequence[int]], n: int, seq_length: int) -> None:
    if not 0 <= n <= MOST_TOKENS:
        raise ValueError(f"tokens {n} must be between 0 and {MOST_TOKENS}; for a longer text, use the result as the next prompt")
    if not prompts or not all(prompts):
        raise ValueError("there is no prompt, or an empty one: give at least one token, such as the end of document")
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if len(prompts[longest]) > seq_length:
        raise ValueError(
            f"prompt {longest + 1} of {len(prompts)} has {len(prompts[longest])} tokens, but the model's context has {seq_length}: shorten "
            "it"
        )


def _elapsed(on: Tensor, start: float) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    return time.perf_counter() - start
