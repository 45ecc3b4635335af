"""The cross entropy twin against torch's own in FP64: losses, gradients in place, masks, and what is not finite."""

import math

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, make, measure
from msamp.kernels.reference.cross_entropy import cross_entropy_, cross_entropy_of_parts_, softmax_parts

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def rows(kind: str, dtype: torch.dtype, shape: tuple[int, int] = (64, 500)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels, and weights of which a fifth is 0."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, shape[1], shape[:1], generator=generator)
    return make(kind, shape).to(dtype), labels, (torch.rand(shape[0], generator=generator) - 0.2).clamp(min=0)


def exact(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient of the weighted sum, in FP64 by torch."""
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (losses * weights).sum().backward()
    return losses.detach(), wide.grad


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_in_fp64(kind, dtype):
    logits, labels, weights = rows(kind, dtype)
    expected, gradient = exact(logits, labels, weights)
    losses = cross_entropy_(logits, labels, weights)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    assert logits.dtype is dtype
    assert logits[weights == 0].count_nonzero() == 0
    normal = gradient.abs() > 1e-37  # softmax goes further down than FP32
    found = measure(gradient * normal, logits.double() * normal)
    assert found.sqnr_db > (100 if dtype is torch.float32 else 45)
    assert found.underflow == 0


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    logits = torch.zeros(3, 4096)
    assert cross_entropy_(logits, torch.tensor([0, 7, 4095]), torch.ones(3)).tolist() == pytest.approx([math.log(4096)] * 3)
    assert logits[0].tolist() == pytest.approx([1 / 4096 - 1] + [1 / 4096] * 4095)


def test_a_masked_column_costs_nothing():
    logits = torch.full((1, 8), -math.inf)
    logits[0, 3:5] = 1.0
    assert cross_entropy_(logits, torch.tensor([3]), torch.ones(1)).item() == pytest.approx(math.log(2))
    assert logits.tolist() == [pytest.approx([0, 0, 0, -0.5, 0.5, 0, 0, 0])]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_what_is_not_finite_shows(bad, weight):
    logits = torch.ones(2, 8)
    logits[1, 5] = bad
    losses = cross_entropy_(logits, torch.tensor([1, 1]), torch.full((2,), weight))
    assert losses.isfinite().tolist() == [True, False]
    assert logits.isfinite().all(1).tolist() == [True, False]


@pytest.mark.parametrize("label", [-100, -1, 8, 2**40])
def test_a_label_outside_the_vocabulary_makes_loss_and_gradient_nan(label):
    logits = torch.ones(2, 8)
    losses = cross_entropy_(logits, torch.tensor([7, label]), torch.ones(2))
    assert losses.isnan().tolist() == [False, True]
    assert logits.isnan().all(1).tolist() == [False, True]


def test_no_rows():
    assert cross_entropy_(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), torch.empty(0)).shape == (0,)


@every_pair
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_columns_spread_over_ranks_are_torch_s_in_fp64(ranks, kind, dtype):
    logits, labels, weights = rows(kind, dtype)
    expected, gradient = exact(logits, labels, weights)
    columns = logits.shape[1] // ranks
    pieces = [piece.contiguous() for piece in logits.split(columns, 1)]
    parts = torch.stack([softmax_parts(piece, labels, columns * rank) for rank, piece in enumerate(pieces)])
    losses = [cross_entropy_of_parts_(piece, labels, weights, parts, columns * rank) for rank, piece in enumerate(pieces)]
    assert all(each.equal(losses[0]) for each in losses)
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-5)
    normal = gradient.abs() > 1e-37
    found = measure(gradient * normal, torch.cat(pieces, 1).double() * normal)
    assert found.sqnr_db > (100 if dtype is torch.float32 else 45)
    assert found.underflow == 0
