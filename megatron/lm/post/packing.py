"""Pack several conversations into one sequence, without attention between them.

Positions restart at each conversation. With such positions and neither mask nor cache, transformers models attend only within conversations
(with a block-diagonal mask, or the variable-length kernel of flash attention). `check_separates` checks that a model does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron.lm.post.chat import Example

LONG = ("refuse", "cut", "drop")  # what to do with a conversation that is longer than a sequence


def fitting(examples: Iterable[Example], seq_length: int, long: str = "refuse") -> list[Example]:
    """Return the conversations, each with at most `seq_length` tokens.

    Args:
        examples: in order.
        seq_length: in tokens.
        long: "refuse" a longer one, "cut" its end, or "drop" it.

    Raises:
        ValueError: if a conversation is longer ("refuse"), its question alone fills the sequence ("cut"), or none is left.
    """
    if long not in LONG:
        raise ValueError(f"--long-rows {long!r} is unknown: give one of {', '.join(LONG)}")
    kept = []
    for number, example in enumerate(examples, 1):
        if len(example.tokens) > seq_length:
            if long == "drop":
                continue
            if long == "refuse":
                raise ValueError(
                    f"conversation {number} has {len(example.tokens)} tokens, but --seq-length is {seq_length}: give --seq-length "
                    f"{len(example.tokens)} or more, or --long-rows cut or drop"
                )
            example = Example(example.tokens[:seq_length], example.answer[:seq_length])
            if not any(example.answer[1:]):
                raise ValueError(
                    f"the question of conversation {number} alone fills --seq-length {seq_length}, so a cut leaves no answer: "
                    "give a longer --seq-length, or --long-rows drop"
                )
        kept.append(example)
    if not kept:
        raise ValueError(f"no conversation has at most --seq-length {seq_length} tokens: give a longer one, or --long-rows cut")
    return kept


def packed(examples: Sequence[Example], seq_length: int) -> list[list[Example]]:
    """Pack conversations into sequences of at most `seq_length` tokens by first fit, longest first, to minimize padding.

    The result does not depend on the order of the conversations.
    """
    sequences: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: (-len(example.tokens), example.tokens)):
        size = len(example.tokens)
        place = next((at for at, left in enumerate(room) if left >= size), None)
        if place is None:
            sequences.append([])
            room.append(seq_length)
            place = len(room) - 1
        sequences[place].append(example)
        room[place] -= size
    return sequences


def batch(sequences: Sequence[Sequence[Example]], seq_length: int, pad: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Collate sequences into a batch for a model and `losses.answer_loss`.

    Returns:
        `input_ids` [b, s] int64; `position_ids` [b, s] int64, which restart at each conversation and at the padding after the last; and
        `answer` [b, s] bool, the tokens to predict, never a conversation's first, which would be predicted from another one.
    """
    shape = len(sequences), seq_length
    tokens = torch.full(shape, pad, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    answer = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = 0
        for example in sequence:
            end = start + len(example.tokens)
            tokens[row, start:end] = torch.tensor(example.tokens)
            positions[row, start:end] = torch.arange(end - start)
            answer[row, start:end] = torch.tensor(example.answer)
            answer[row, start] = False
            start = end
        positions[row, start:] = torch.arange(seq_length - start)
    tensors = {"input_ids": tokens, "position_ids": positions, "answer": answer}
    return {name: values.to(device) for name, values in tensors.items()}


@torch.no_grad()
def check_separates(model: Any) -> None:
    """Check that a model separates packed conversations: the logits of the second must not depend on the tokens of the first.

    Call it before the model is converted: an FP8 cast has one scale per tensor, through which conversations affect each other slightly.

    Raises:
        ValueError: if the logits change.
    """
    device, size = next(model.parameters()).device, min(8, model.config.vocab_size)
    first = torch.arange(size, device=device)
    positions = torch.cat([first, first])[None]
    training = model.training
    model.eval()
    seen = [
        model(input_ids=torch.cat([neighbour, first])[None], position_ids=positions, use_cache=False).logits[0, size:]
        for neighbour in (first, first.flip(0))
    ]
    model.train(training)
    if not torch.equal(*seen):
        raise ValueError(
            f"{type(model).__name__} attends across packed conversations, because it does not derive its mask from positions: "
            "use --no-packing"
        )
