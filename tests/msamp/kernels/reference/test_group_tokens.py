"""Rows of experts, against a loop over tokens."""

import pytest
import torch

from helpers.choices import each_once
from msamp.kernels.reference.group_tokens import group_tokens, row_capacity

LOADS = {
    "random": torch.randint(0, 7, (40, 2), generator=torch.Generator().manual_seed(0)),
    "one expert takes all": torch.full((20, 1), 3),
    "the first and the last have none": torch.tensor([[1, 5], [5, 2], [1, 2]]),
    "one token": torch.tensor([[6, 0]]),
    "no tokens": torch.empty((0, 2), dtype=torch.int64),
    "some experts of another rank": torch.tensor([[-1, 5], [5, -1], [-1, -1], [0, 6]]),
    "all experts of another rank": torch.full((3, 2), -1),
}


@each_once(load=list(LOADS), alignment=[1, 16, 128])
def test_each_pair_has_a_row_of_its_expert(load, alignment):
    experts, count = LOADS[load], 7
    offsets, source, places = group_tokens(experts, count, alignment)
    tokens, top_k = experts.shape
    assert (offsets.dtype, source.dtype, places.dtype) == (torch.int32,) * 3
    assert (offsets.shape, source.shape, places.shape) == ((count,), (row_capacity(tokens * top_k, count, alignment),), experts.shape)
    assert not (offsets % alignment).any()
    starts, rows = [0, *offsets.tolist()], places.flatten().tolist()
    for e in range(count):
        own = [pair for pair, expert in enumerate(experts.flatten().tolist()) if expert == e]
        assert [rows[pair] for pair in own] == list(range(starts[e], starts[e] + len(own)))
        assert starts[e + 1] == starts[e] + -(-len(own) // alignment) * alignment
    here = [pair for pair, expert in enumerate(experts.flatten().tolist()) if expert >= 0]
    assert [rows[pair] for pair in range(tokens * top_k) if pair not in here] == [-1] * (tokens * top_k - len(here))
    assert [source[rows[pair]].item() for pair in here] == here
    assert int((source >= 0).sum()) == len(here)


def test_the_capacity_is_enough_for_the_worst_load():
    for tokens, count, alignment in ((5, 3, 4), (1, 8, 128), (128, 2, 128), (300, 4, 128), (0, 4, 128)):
        capacity = row_capacity(tokens, count, alignment)
        worst = min(count, tokens)
        sizes = [1] * (worst - 1) + [tokens - worst + 1] if worst else []
        assert sum(-(-size // alignment) * alignment for size in sizes) <= capacity


@pytest.mark.parametrize("experts", [torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2)], ids=["1-d", "floats"])
def test_what_is_no_choice_of_experts_is_refused(experts):
    with pytest.raises(ValueError, match=r"experts are .*; they must be integers \[tokens, top-k\]"):
        group_tokens(experts, 2, 16)
