"""Copies of rows to experts and back, against indexing by hand."""

import torch

from helpers.numerics import codes, make
from msamp.kernels.reference.group_tokens import group_tokens
from msamp.kernels.reference.permute import permute, unpermute
from msamp.numerics.formats import E4M3

EXPERTS = torch.randint(0, 5, (30, 2), generator=torch.Generator().manual_seed(1))
OFFSETS, SOURCE, PLACES = group_tokens(EXPERTS, 5, 16)
X = make("normal", (30, 24)).to(E4M3.dtype)


def test_every_row_is_its_token_s_and_padding_is_zero():
    y, y_t = permute(X, SOURCE, 2, row=True, col=True)
    assert codes(y_t).equal(codes(y).t())
    for row, pair in enumerate(SOURCE.tolist()):
        assert codes(y[row]).equal(codes(X[pair // 2]) if pair >= 0 else torch.zeros(24, dtype=torch.int32))


def test_what_is_not_requested_is_empty():
    assert [part.numel() for part in permute(X, SOURCE, 2, row=True)] == [SOURCE.numel() * 24, 0]
    assert [part.numel() for part in permute(X, SOURCE, 2, col=True)] == [0, SOURCE.numel() * 24]


def test_rows_of_a_token_are_added_in_fp32_and_rounded_once():
    y = make("log-normal", (SOURCE.numel(), 24)).bfloat16()
    want = torch.stack([y[rows[0]].float() + y[rows[1]].float() for rows in PLACES.tolist()]).bfloat16()
    assert unpermute(y, PLACES).equal(want)


def test_a_choice_of_another_rank_adds_nothing():
    y, places = make("normal", (SOURCE.numel(), 24)), PLACES.clone()
    places[::2, 0] = -1
    want = y[places[:, 1]] + torch.where(places[:, :1] < 0, 0.0, y[places[:, 0]])
    assert unpermute(y, places).equal(want)


def test_there_and_back_is_top_k_times_the_token():
    y, _ = permute(X, SOURCE, 2, row=True)
    assert unpermute(y.float(), PLACES).equal(2 * X.float())
