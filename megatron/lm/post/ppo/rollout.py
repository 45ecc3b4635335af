"""Sample answers from a policy during its training, and score them.

Generation uses transformers with its KV cache on the training model itself, so no weights are copied to another engine or merged. At O3 the
GEMM reads the stored FP8 weight. At O1 and O2 each GEMM casts its layer's FP16 weight to a temporary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.lm.post.losses import token_log_probs


@dataclass(frozen=True)
class Rollout:
    """Prompts, padded on the left, and their answers, padded on the right.

    Attributes:
        tokens: int64 [b, p + n].
        attended: bool [b, p + n], False at padding.
        answer: bool [b, n], the tokens of answers, including the end-of-text token if it was sampled.
    """

    tokens: torch.Tensor
    attended: torch.Tensor
    answer: torch.Tensor

    @property
    def length(self) -> int:
        """n."""
        return self.answer.shape[1]

    @property
    def answers(self) -> torch.Tensor:
        """int64 [b, n]."""
        return self.tokens[:, -self.length :]

    def rows(self, chosen: torch.Tensor) -> "Rollout":
        """Return a rollout of some of the rows."""
        return Rollout(self.tokens[chosen], self.attended[chosen], self.answer[chosen])

    def inputs(self) -> dict[str, Any]:
        """Return the arguments for a model; positions start at a prompt's first token."""
        positions = (self.attended.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": self.tokens, "attention_mask": self.attended.long(), "position_ids": positions, "use_cache": False}


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    eos: int,
    pad: int,
    seed: int,
    cache: bool = True,
) -> Rollout:
    """Sample an answer to each prompt.

    Args:
        model: a causal transformers model, converted or not; its mode is restored.
        prompts: tokens, at least one each.
        max_new_tokens: maximum length of an answer.
        temperature: divides the logits; 0 is greedy decoding.
        eos, pad: end-of-text and padding tokens.
        seed: of the samples; torch's global generators do not change.
        cache: use a KV cache; otherwise every token recomputes the whole sequence.

    Returns:
        `max_new_tokens` columns, or as many as the longest answer has.
    """
    if not prompts or not all(prompts):
        raise ValueError("there is no prompt, or an empty one: give each prompt at least one token")
    from transformers import GenerationConfig

    device = next(model.parameters()).device
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    attended = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts], device=device)
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, use_cache=cache, **drawing)
    training, habits = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()  # otherwise the folder's own would set what `config` leaves open
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            whole = model.generate(input_ids=tokens, attention_mask=attended.long(), generation_config=config)
    finally:
        model.generation_config = habits
        model.train(training)
    answers = whole[:, width:]
    ended = (answers == eos).cumsum(-1)
    inside = (ended == 0) | ((ended == 1) & (answers == eos))
    whole = torch.cat([tokens, torch.where(inside, answers, pad)], dim=1)
    return Rollout(whole, torch.cat([attended, inside], dim=1), inside)


def log_probs(model: Any, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Return the log probability of each answer token under the sampling distribution, FP32 [b, n]."""
    logits = model(**rollout.inputs(), logits_to_keep=rollout.length + 1).logits
    return token_log_probs(logits[:, -rollout.length - 1 : -1], rollout.answers, temperature or 1.0)


def values(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return a value model's output before each answer token, FP32 [b, n]."""
    return model(**rollout.inputs()).logits[:, -rollout.length - 1 : -1, 0].float()


@torch.no_grad()
def scores(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return a reward model's output for each prompt with its answer, FP32 [b]."""
    return model(**rollout.inputs()).logits[:, 0].float()
