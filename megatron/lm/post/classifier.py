"""A classifier on top of an encoder that the trainer has pre-trained by `--objective masked-lm`, and pairs of texts as its input.

A pair stands as `<eod> first <eod> second`: the end of a document is what parted texts in pre-training, and the one token that every
tokenizer here has. The second text is cut at its end to the sequence. The rows of a batch are filled up to the longest of them; no token
sees what they are filled with (`SDPAttention.forward`), and it takes no part in the mean.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.lm.config.baselines import PeerRecipe
from megatron.lm.data.masked import MASKED, model_vocabulary
from megatron.lm.data.tokenizer import Tokenizer
from megatron.lm.model.gpt import GPT
from msamp.numerics.recipe import Recipe

POOLING = ("first", "mean")
MULTIPLE = 16  # of a batch's length: FP8 GEMMs of the hardware want as many rows


class Example(NamedTuple):
    """Tokens of a pair, and its class."""

    tokens: list[int]
    label: int


class Classifier(nn.Module):
    """An encoder with RoBERTa's classification head: pooled hidden state -> dropout -> linear -> tanh -> dropout -> linear.

    The head is in the encoder's dtype and is trained as an embedding of the recipe is: linear layers in FP8 are those of the encoder.

    Args:
        encoder: pre-trained to see both sides.
        classes: of the output.
        pooling: "first" takes the hidden state of the first token, "mean" the mean over all tokens of a row.
        dropout: in the head.
        seed: of the head's weights, which are normal with the encoder's standard deviation of 0.02; biases are 0.
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
        """megatron-core's configuration of the encoder."""
        return self.encoder.config

    def forward(self, tokens: Tensor, position_ids: Tensor, attended: Tensor) -> Tensor:
        """tokens, position_ids [b, s] int64 and attended [b, s] bool, as `batch` makes them -> logits [b, classes] FP32."""
        hidden = self.encoder.hidden_states(tokens, position_ids, ~attended[:, None, None, :])
        if self.pooling == "first":
            pooled = hidden[0]
        else:
            weights = attended.t()[:, :, None].float()
            pooled = ((hidden.float() * weights).sum(0) / weights.sum(0)).to(hidden.dtype)
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(pooled))))).float()


def check_encoder(info: dict[str, Any], config: Any, tokenizer: Tokenizer, path: Path) -> None:
    """See that a checkpoint is an encoder, and that a tokenizer is its own.

    Args:
        info: the `checkpoint.json`.
        config: the `Config` of the run that wrote it, with the tokenizer's files as they are now.
        tokenizer: made of them.
        path: named in messages.

    Raises:
        ValueError: it is a GPT's, or the tokenizer has another vocabulary.
    """
    if config.model.objective != MASKED:
        raise ValueError(
            f"{path} holds a GPT (--objective {config.model.objective}), of which no token sees what follows it: give a checkpoint that "
            f"was trained with --objective {MASKED}"
        )
    now = model_vocabulary(config, tokenizer)
    if now != info["vocab_size"]:
        raise ValueError(
            f"the tokenizer gives a vocabulary of {now} ids, and {path} was trained with {info['vocab_size']}: give the tokenizer that its "
            "data was made with, by --tokenizer-model, or --vocab-file and --merge-file"
        )


def check_recipe(recipe: Recipe) -> None:
    """ValueError for layers of another library, with an attention that would not hear of padding."""
    if isinstance(recipe, PeerRecipe):
        raise ValueError(f"precision {recipe.name}: Transformer Engine's attention is given no padding mask here; take --precision bf16")


def encode_pair(tokenizer: Tokenizer, first: str, second: str, length: int, where: str) -> list[int]:
    """Tokens of a pair, at most `length`; `where` names it in messages.

    Raises:
        ValueError: a text has no token, or the first leaves no room for one of the second.
    """
    parts = []
    for name, text in (("question", first), ("passage", second)):
        found = tokenizer.tokenize(text)
        if not found:
            raise ValueError(f"the {name} in {where} has no token: give it a text that the tokenizer spells, or leave the row out")
        parts.append(found)
    begun = [tokenizer.eod, *parts[0], tokenizer.eod]
    if len(begun) >= length:
        raise ValueError(
            f"the question in {where} has {len(parts[0])} tokens, which leave none of {length} for its passage: give --seq-length "
            f"{len(begun) + 1} or more, or leave the row out"
        )
    return [*begun, *parts[1]][:length]


def batch(examples: Sequence[Example], positions: int, fill: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Rows side by side, filled up behind.

    Args:
        examples: with at least one token each.
        positions: that the encoder knows; what is filled up stays within them.
        fill: id of the tokens behind a row.

    Returns:
        `tokens`, `position_ids` [b, s] int64, `attended` [b, s] bool and `labels` [b] int64; s is the longest row's length up to the next
        multiple of 16.
    """
    longest = -(-max(len(example.tokens) for example in examples) // MULTIPLE) * MULTIPLE
    tokens = torch.full((len(examples), longest), fill, dtype=torch.int64)
    attended = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        attended[row, : len(example.tokens)] = True
    places = torch.arange(longest).clamp(max=positions - 1).expand(len(examples), longest)
    made = {"tokens": tokens, "position_ids": places, "attended": attended, "labels": torch.tensor([each.label for each in examples])}
    return {name: values.to(device) for name, values in made.items()}
