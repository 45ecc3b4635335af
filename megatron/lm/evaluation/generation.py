"""Continue prompts: sampled token by token from a `Decoder`, each sequence as if it were alone.

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

MOST_TOKENS = 10**4  # that are asked for at once
_DIVERGED = "the model's logits are NaN or infinite: it has diverged, load an older checkpoint"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among this many; 0 means all.
        top_p: draw among the likeliest that have this share of the probability together; 1 means all.
        seed: of the first sequence's draws; the next ones have the numbers after it, so that each has what it has alone.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be finite and 0 or more: 0 takes the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be 0 or more: 0 draws among all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be above 0 and at most 1: 1 draws among all tokens")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} must lie between -2^63 and 2^63 - 1")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1):
            raise ValueError(
                f"temperature 0 takes the likeliest token, and top-k {self.top_k} and top-p {self.top_p} have no effect: leave them out"
            )


class Steps(Protocol):
    """What is asked of a `Decoder`."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """FP32 [b, vocabulary] after the last token of each."""

    def step(self, tokens: Tensor) -> Tensor:
        """tokens [b] int64 -> FP32 [b, vocabulary] after them."""


@dataclass
class Generated:
    """What `generate` made.

    Attributes:
        tokens: the continuation of each prompt, without the prompt and without the end of document.
        logprobs: of each of its tokens, in nats, under the distribution that it was drawn from before top-k and top-p, with the temperature
            (0: that of temperature 1).
        ended: whether it ended itself, by the end of document or where it was to stop.
        prompt_tokens, prompt_seconds, new_tokens, new_seconds: what was read and what was appended, and how long that took.
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
        """Tokens read and appended, and tokens/s."""
        read = self.prompt_tokens / max(self.prompt_seconds, 1e-9)
        made = self.new_tokens / max(self.new_seconds, 1e-9)
        return (
            f"{self.prompt_tokens} tokens of {len(self.tokens)} prompts in {self.prompt_seconds:.2f} s ({read:.0f} tokens/s), "
            f"{self.new_tokens} tokens appended in {self.new_seconds:.2f} s ({made:.1f} tokens/s)"
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
    """Append up to `n` tokens to each prompt, all of them side by side.

    A sequence that would outgrow `seq_length` forgets the older half of its context, and goes on from the rest.

    Args:
        prompts: token ids, each at least one and at most `seq_length`.
        n: tokens to append; fewer where the end of document comes first.
        seq_length: the longest context that the model sees; the decoder's capacity.
        vocab_size: columns of the logits beyond it are padding and never drawn.
        eod: ends a continuation; None: nothing does.
        stopped: whether a continuation so far ends where it is; asked after each token.

    Raises:
        ValueError: no prompt, an empty one or one longer than the sequence, `n` out of range, or logits that are not finite.
    """
    _check(prompts, n, seq_length)
    made = Generated([[] for _ in prompts], [[] for _ in prompts], [False] * len(prompts))
    if n == 0:
        return made
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    contexts = [list(prompt) for prompt in prompts]
    made.prompt_tokens, start = sum(map(len, prompts)), time.perf_counter()
    logits = decoder.prefill(contexts)
    made.prompt_seconds, start = _elapsed(logits, start), time.perf_counter()
    for left in reversed(range(n)):
        uniforms = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
        drawn, logprobs, finite = _drawn(logits[:, :vocab_size], sampling, uniforms)
        # The host waits for the device once a token. FP64 holds token ids and FP32 exactly.
        found = torch.stack([drawn.double(), logprobs.double(), finite.double()]).tolist()
        if not all(found[2]):
            raise ValueError(_DIVERGED)
        for row, (token, logprob) in enumerate(zip(map(int, found[0]), found[1], strict=True)):
            contexts[row].append(token)
            if made.ended[row]:
                continue
            made.ended[row] = token == eod
            if token != eod:
                made.tokens[row].append(token)
                made.logprobs[row].append(logprob)
                made.ended[row] = stopped is not None and stopped(made.tokens[row])
            made.new_tokens += 1
        if not left or all(made.ended):
            break
        if max(map(len, contexts)) > seq_length:
            contexts = [context[-((seq_length + 1) // 2) :] if len(context) > seq_length else context for context in contexts]
            logits = decoder.prefill(contexts)
        else:
            logits = decoder.step(drawn)
    made.new_seconds = _elapsed(logits, start)
    return made


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row.

    Args:
        logits: [b, vocabulary] FP32.
        uniforms: FP64 [b] in [0, 1): where in the cumulated probabilities, from the likeliest down, each draw falls.

    Returns:
        int64 [b], and their log-probabilities, FP32 [b] (`Generated.logprobs`).

    Raises:
        ValueError: logits that are NaN or infinite.
    """
    drawn, logprobs, finite = _drawn(logits, sampling, uniforms)
    if not bool(finite.all()):
        raise ValueError(_DIVERGED)
    return drawn, logprobs


def _drawn(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `draw`, and bool [b]: whether the logits of a row are finite; of a row of others, some token. The host waits for nothing."""
    finite = logits.isfinite().all(-1)
    greedy = sampling.temperature == 0
    count = 1 if greedy else min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, indices = logits.topk(count, dim=-1)
    # From the likeliest down, and in FP64: so that no temperature above 0 divides to infinity less infinity.
    top = values[:, :1].double()
    temperature = 1.0 if greedy else sampling.temperature
    everything = ((logits.double() - top) / temperature).logsumexp(-1, keepdim=True)
    logprobs = (values.double() - top) / temperature - everything
    if greedy:
        return indices[:, 0], logprobs[:, 0].float(), finite
    shares = logprobs.exp()
    shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill(before >= sampling.top_p, 0.0)  # the likeliest stays always: nothing is before it
    cumulated = shares.cumsum(-1)
    uniforms = uniforms.to(logits.device, non_blocking=True)
    places = torch.searchsorted(cumulated, (uniforms * cumulated[:, -1]).unsqueeze(-1), right=True)
    places = places.clamp(max=(shares > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # a draw that rounds up to the sum, and shares of NaN
    return indices.gather(-1, places)[:, 0], logprobs.gather(-1, places)[:, 0].float(), finite


def _check(prompts: Sequence[Sequence[int]], n: int, seq_length: int) -> None:
    if not 0 <= n <= MOST_TOKENS:
        raise ValueError(f"tokens {n} must lie between 0 and {MOST_TOKENS}; for a longer text, give what has come as the next prompt")
    if not prompts or not all(prompts):
        raise ValueError("there is no prompt, or one without a token: give a prompt, if only the end of document")
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if len(prompts[longest]) > seq_length:
        raise ValueError(
            f"prompt {longest + 1} of {len(prompts)} has {len(prompts[longest])} tokens, and the model sees {seq_length}: shorten it"
        )


def _elapsed(on: Tensor, start: float) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    return time.perf_counter() - start
