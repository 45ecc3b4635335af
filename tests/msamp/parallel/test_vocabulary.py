"""The LM head's loss over a vocabulary that is spread over ranks, against the same head on one process."""

from typing import Any

import pytest
import torch
from torch.distributed import group

from helpers import dist
from helpers.numerics import make
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.nn.vocabulary_loss import linear_cross_entropy
from msamp.parallel.vocabulary import vocabulary_parallel_cross_entropy

TOKENS, VOCABULARY, HIDDEN = 300, 60, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNKED = 128 * VOCABULARY  # a chunk of 128 tokens in FP16 on two ranks


def case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """hidden, weight, labels and weights, a third of them 0."""
    generator = torch.Generator().manual_seed(1)
    weights = (torch.rand(TOKENS, generator=generator) < 0.7).float()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[:4] = torch.tensor([0, VOCABULARY // 2 - 1, VOCABULARY // 2, VOCABULARY - 1])
    return make("normal", (TOKENS, HIDDEN)).to(dtype), (0.5 * make("normal", (VOCABULARY, HIDDEN), seed=2)).to(dtype), labels, weights


def run(dtype: torch.dtype, sequence_parallel: bool, label: int | None = None, precision: str = "bf16") -> dict[str, Any]:
    """This rank's results of forward and of a backward from 1/64, and what it sent."""
    hidden, weight, labels, weights = case(dtype)
    if label is not None:
        labels[7], weights[7] = label, 1.0
    sent = WireBytes()
    peers = Peers(group.WORLD, sent)
    shard = weight.chunk(peers.ranks)[peers.rank].clone().requires_grad_()
    own = (hidden.chunk(peers.ranks)[peers.rank] if sequence_parallel else hidden).clone().requires_grad_()
    total, losses = vocabulary_parallel_cross_entropy(
        own, shard, labels, weights, peers, sequence_parallel=sequence_parallel, chunk_bytes=CHUNKED, precision=precision
    )
    with torch.no_grad():
        quiet = vocabulary_parallel_cross_entropy(own, shard, labels, weights, peers, sequence_parallel=sequence_parallel)
    sent_in_forward = sent.take()
    (total / 64).backward()
    return {
        "total": total.detach(),
        "losses": losses,
        "quiet": quiet,
        "hidden": own.grad,
        "weight": shard.grad,
        "sent": sent_in_forward,
        "sent_back": sent.take(),
    }


def every_case() -> dict[str, Any]:
    found: dict[str, Any] = {f"{dtype} {spread}": run(dtype, spread) for dtype in DTYPES for spread in (False, True)}
    hidden, weight, labels, weights = case(torch.bfloat16)
    peers = Peers(group.WORLD, WireBytes())
    shard = weight.chunk(peers.ranks)[peers.rank]
    found["fp8"] = vocabulary_parallel_cross_entropy(hidden, shard, labels, weights, peers, sequence_parallel=False, precision="fp8")[1]
    found["fp8-all"] = run(torch.bfloat16, True, precision="fp8-all")
    return found | {f"label {label}": run(torch.float32, True, label) for label in (-1, VOCABULARY, 2**40)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return dist.run(every_case, 2)


@pytest.mark.parametrize("spread", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_one_process(ranks: list[dict[str, Any]], dtype: torch.dtype, spread: bool):
    """Losses and gradients within the rounding of one more sum; both ranks have the same losses, bit for bit."""
    first, second = (rank[f"{dtype} {spread}"] for rank in ranks)
    hidden, weight, labels, weights = case(dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, labels, weights)
    (total / 64).backward()
    assert first["losses"].equal(second["losses"])
    assert first["total"].equal(second["total"])
    assert first["quiet"][1].equal(first["losses"])
    torch.testing.assert_close(first["losses"], losses, rtol=1e-6, atol=1e-5)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    got = torch.cat((first["hidden"], second["hidden"])) if spread else first["hidden"]
    if not spread:
        assert got.equal(second["hidden"])
    for mine, want in ((got, hidden.grad), (torch.cat((first["weight"], second["weight"])), weight.grad)):
        assert mine.dtype is dtype
        assert (mine.double() - want.double()).norm() <= rounding * want.double().norm()


@pytest.mark.parametrize("label", [-1, VOCABULARY, 2**40])
def test_a_label_outside_the_vocabulary_is_nan_on_every_rank(ranks: list[dict[str, Any]], label: int):
    for rank in ranks:
        found = rank[f"label {label}"]
        assert found["total"].isnan()
        assert found["losses"].isnan().nonzero().tolist() == [[7]]


def test_fp8_logits_have_a_scale_for_each_shard_of_the_weight(ranks: list[dict[str, Any]]):
    hidden, weight, labels, weights = case(torch.bfloat16)
    losses = linear_cross_entropy(hidden, weight, labels, weights, precision="fp8")[1]
    assert ranks[0]["fp8"].equal(ranks[1]["fp8"])
    torch.testing.assert_close(ranks[0]["fp8"], losses, rtol=2**-6, atol=2**-3)
    assert not ranks[0]["fp8"].equal(ranks[0][f"{torch.bfloat16} False"]["losses"])


def test_fp8_gradients_equal_those_of_one_process_within_the_rounding_of_a_shard(ranks: list[dict[str, Any]]):
    first, second = (rank["fp8-all"] for rank in ranks)
    hidden, weight, labels, weights = case(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, labels, weights, precision="fp8-all")
    (total / 64).backward()
    assert first["losses"].equal(second["losses"])
    torch.testing.assert_close(first["losses"], losses, rtol=2**-6, atol=2**-3)
    assert first["sent"] == ranks[0][f"{torch.bfloat16} True"]["sent"]
    for name, want in (("hidden", hidden.grad), ("weight", weight.grad)):
        mine = torch.cat([rank["fp8-all"][name] for rank in ranks])
        assert mine.dtype is torch.bfloat16
        assert (mine.double() - want.double()).norm() <= 0.1 * want.double().norm()


def test_bytes_are_counted(ranks: list[dict[str, Any]]):
    """Forward ran twice: with chunks and without."""
    whole, spread = (ranks[0][f"{torch.bfloat16} {each}"] for each in (False, True))
    softmax = {("activation", "LM head softmax all-gather"): 2 * 3 * 4 * TOKENS}
    activation = 2 * HIDDEN * TOKENS
    assert whole["sent"] == softmax
    assert spread["sent"] == softmax | {("activation", "LM head input all-gather"): 2 * activation // 2}
    assert whole["sent_back"] == {("activation", "LM head grad_input all-reduce"): activation}
    assert spread["sent_back"] == {("activation", "LM head grad_input reduce-scatter"): activation // 2}
