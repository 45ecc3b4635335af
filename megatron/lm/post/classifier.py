"""A classifier on an encoder that the trainer has pre-trained with `--objective masked-lm`, with pairs of texts as input.

A pair is encoded as `<eod> first <eod> second`: the end of document separated texts in pre-training, and every tokenizer here has it. The
second text is truncated to the sequence length. Rows of a batch are right-padded to the longest; no token attends to padding
(`SDPAttention.forward`), and the mean excludes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.lm.config.sections.baselines import PeerRecipe
from megatron.lm.data.masked import MASKED, model_vocabulary
from megatron.lm.data.tokenizers.tokenizer import Tokenizer
from megatron.lm.model.gpt import GPT
from msamp.numerics.recipe import Recipe

POOLING = ("first", "mean")
MULTIPLE = 16  # batch lengths are a multiple of it, as FP8 GEMMs of the hardware require of rows


class Example(NamedTuple):
    """Tokens of a pair, and its class."""

    tokens: list[int]
    label: int


class Classifier(nn.Module):
    """An encoder with RoBERTa's classification head: pooled hidden state -> dropout -> linear -> tanh -> dropout -> linear.

    The head is in the encoder's dtype and trained like the recipe's embeddings: only the encoder's linear layers use FP8.

    Args:
        encoder: pre-trained with bidirectional attention.
        classes: number of classes.
        pooling: "first" uses the hidden state of the first token, "mean" the mean over all tokens of a row.
        dropout: in the head.
        seed: for the head's weights, normal with the encoder's standard deviation of 0.02; biases are 0.
    """

    def __init__(self, encoder: GPT, classes: int, *, pooling: str, dropout: float, seed: int) -> None:
        super().__init__()
        if pooling not in POOLING:
            raise ValueError(f"pooling {pooling!r}: choose one of {', '.join(POOLING)}")
        self.encoder, self.pooling = encoder, pooling
        weight = next(encoder.parameters())
        width, draw = encoder.config.hidden_size, torch.Generator().manual_seed(seed)
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, classes)
        for layer in (self.dense, self.out):
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw) * 0.02)
                layer.bias.zero_()
            layer.to(weight.device, encoder.config.params_dtype)
        self.dropout = nn.Dropout(dropout)

    @property
    def config(self) -> Any:
        """Return megatron-core's configuration of the encoder."""
        return self.encoder.config

    def forward(self, tokens: Tensor, position_ids: Tensor, attended: Tensor) -> Tensor:
        """tokens, position_ids [b, s] int64 and attended [b, s] bool, as returned by `batch` -> logits [b, classes] FP32."""
        hidden = self.encoder.hidden_states(tokens, position_ids, ~attended[:, None, None, :])
        if self.pooling == "first":
            pooled = hidden[0]
        else:
            weights = attended.t()[:, :, None].float()
            pooled = ((hidden.float() * weights).sum(0) / weights.sum(0)).to(hidden.dtype)
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(pooled))))).float()


def check_encoder(info: dict[str, Any], config: Any, tokenizer: Tokenizer, path: Path) -> None:
    """Check that a checkpoint is an encoder, and that the tokenizer matches it.

    Args:
        info: the `checkpoint.json`.
        config: the `Config` of the run that wrote it, with the tokenizer's current files.
        tokenizer: built from them.
        path: for error messages.

    Raises:
        ValueError: if it is a GPT, or the vocabulary size differs.
    """
    if config.model.objective != MASKED:
        raise ValueError(
            f"{path} contains a GPT with causal attention (--objective {config.model.objective}): give a checkpoint that was trained "
            f"with --objective {MASKED}"
        )
    now = model_vocabulary(config.model.objective, tokenizer)
    if now != info["vocab_size"]:
        raise ValueError(
            f"the tokenizer has a vocabulary of {now} ids, but {path} was trained with {info['vocab_size']}: give the tokenizer of its "
            "training data with --tokenizer-model, or --vocab-file and --merge-file"
        )


def check_recipe(recipe: Recipe) -> None:
    """Raise a ValueError for layers of another library, whose attention would get no padding mask."""
    if isinstance(recipe, PeerRecipe):
        raise ValueError(f"precision {recipe.name}: Transformer Engine's attention gets no padding mask here; use --precision bf16")


def encode_pair(tokenizer: Tokenizer, first: str, second: str, length: int, where: str) -> list[int]:
    """Return the tokens of a pair, at most `length`; `where` is its location for error messages.

    Raises:
        ValueError: if a text has no token, or the first leaves no room for the second.
    """
    parts = []
    for name, text in (("question", first), ("passage", second)):
        tokens = tokenizer.tokenize(text)
        if not tokens:
            raise ValueError(f"the {name} in {where} has no token: give a text that the tokenizer can encode, or leave the row out")
        parts.append(tokens)
    begun = [tokenizer.eod, *parts[0], tokenizer.eod]
    if len(begun) >= length:
        raise ValueError(
            f"the question in {where} has {len(parts[0])} tokens, which leave none of {length} for its passage: give --seq-length "
            f"{len(begun) + 1} or more, or leave the row out"
        )
    return [*begun, *parts[1]][:length]


def batch(examples: Sequence[Example], positions: int, fill: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Collate examples into a right-padded batch.

    Args:
        examples: with at least one token each.
        positions: maximum of the encoder's positions, which padding does not exceed.
        fill: id of padding tokens.

    Returns:
        `tokens`, `position_ids` [b, s] int64, `attended` [b, s] bool and `labels` [b] int64; s is the longest row's length, rounded
        up to a multiple of 16.
    """
    longest = -(-max(len(example.tokens) for example in examples) // MULTIPLE) * MULTIPLE
    tokens = torch.full((len(examples), longest), fill, dtype=torch.int64)
    attended = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        attended[row, : len(example.tokens)] = True
    places = torch.arange(longest).clamp(max=positions - 1).expand(len(examples), longest)
    tensors = {"tokens": tokens, "position_ids": places, "attended": attended, "labels": torch.tensor([each.label for each in examples])}
    return {name: values.to(device) for name, values in tensors.items()}
