"""The Triton cross entropy against its twin: under the interpreter here, compiled on a GPU.

Exponentials and the order of the sum differ, so FP32 is compared within 1e-5, BF16 and FP16 code by code: at most 1 % of the codes may
differ, by one.
"""

import importlib
import math

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import KINDS, bits, codes, make, measure
from msamp.kernels.reference.cross_entropy import cross_entropy_ as twin
from msamp.kernels.reference.cross_entropy import cross_entropy_of_parts_, softmax_parts

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cross_entropy").cross_entropy_(*args)


def arguments(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, the first and the last column among them, and weights of which a fifth is 0."""
    generator = torch.Generator().manual_seed(1)
    M, V = logits.shape
    labels = torch.randint(0, V, (M,), generator=generator)
    labels[0], labels[-1] = 0, V - 1
    weights = (torch.rand(M, generator=generator) - 0.2).clamp(min=0)
    return labels.to(logits.device), weights.to(logits.device)


def assert_gradient(got: torch.Tensor, want: torch.Tensor, weights: torch.Tensor) -> None:
    if want.dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    else:
        least = 2.0**-24 if want.dtype is torch.float16 else 1e-30  # a GPU may flush what is far below
        normal = want.abs().double().cpu() > least
        apart = (codes(got) - codes(want)).abs() * normal
        assert apart.max() <= 1
        assert apart.sum() <= 0.01 * normal.sum()
        assert (got.abs().double().cpu() * ~normal).max() <= 2 * least
    assert got[weights == 0].count_nonzero() == 0


def assert_same(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel against twin; gives the kernel's gradient and the weights."""
    labels, weights = arguments(logits)
    got, want = logits.clone(), logits.clone()
    losses, expected = kernel(got, labels, weights), twin(want, labels, weights)
    assert (losses.dtype, losses.shape, losses.device) == (expected.dtype, expected.shape, expected.device)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-5)
    assert_gradient(got, want, weights)
    return got, weights


@every_value
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 128), (5, 1000), (3, 20_000)], ids=str)
def test_ragged_shapes_and_several_blocks(shape, dtype, triton_device):
    assert_same((3 * make("normal", shape, device=triton_device)).to(dtype))


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_three_ways_on_three_kinds(kind, dtype, triton_device):
    logits = make(kind, (16, 9000), device=triton_device).to(dtype)
    got, weights = assert_same(logits)
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, arguments(logits)[0], reduction="none")
    (losses * weights).sum().backward()
    normal = wide.grad.abs() > 1e-37  # softmax goes further down than FP32
    found = measure(wide.grad * normal, got.double() * normal)
    assert found.sqnr_db > (100 if dtype is torch.float32 else 45)
    assert found.underflow == 0 or dtype is torch.float16  # the vocabulary loss multiplies the weights there


def test_columns_of_minus_infinity_cost_nothing(triton_device):
    logits = torch.full((2, 9000), -math.inf, device=triton_device)
    logits[:, 8990:] = 1.0
    labels = torch.tensor([8990, 8999], device=triton_device)
    losses = kernel(logits, labels, torch.ones(2, device=triton_device))
    assert losses.tolist() == pytest.approx([math.log(10)] * 2)
    assert logits[0, :8990].count_nonzero() == 0
    assert logits[0, 8990:].tolist() == pytest.approx([-0.9] + [0.1] * 9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 8999])
def test_what_is_not_finite_shows(bad, at, triton_device):
    logits = torch.ones(2, 9000, device=triton_device)
    logits[1, at] = bad
    losses = kernel(logits, torch.tensor([1, 1], device=triton_device), torch.zeros(2, device=triton_device))
    assert losses.isfinite().tolist() == [True, False]
    assert logits.isfinite().all(1).tolist() == [True, False]


@pytest.mark.parametrize("label", [-100, 8, 2**40])
def test_a_label_outside_the_vocabulary_makes_loss_and_gradient_nan(label, triton_device):
    logits = torch.ones(2, 8, device=triton_device)
    losses = kernel(logits, torch.tensor([7, label], device=triton_device), torch.ones(2, device=triton_device))
    assert losses.isnan().tolist() == [False, True]
    assert logits.isnan().all(1).tolist() == [False, True]


def test_no_rows(triton_device):
    nothing = torch.empty(0, device=triton_device)
    empty, module = torch.empty(0, 8, device=triton_device), importlib.import_module("msamp.kernels.triton.cross_entropy")
    assert kernel(empty, nothing.long(), nothing).shape == (0,)
    parts = module.softmax_parts(empty, nothing.long(), 0)
    assert parts.shape == (3, 0)
    assert module.cross_entropy_of_parts_(empty, nothing.long(), nothing, parts[None], 0).shape == (0,)


def spread(logits: torch.Tensor, ranks: int, labels: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient by the two kernels, the columns spread over ranks; each part and each loss as the twins have it."""
    module = importlib.import_module("msamp.kernels.triton.cross_entropy")
    columns = logits.shape[1] // ranks
    pieces = [piece.contiguous() for piece in logits.split(columns, 1)]
    parts = torch.stack([module.softmax_parts(piece, labels, columns * rank) for rank, piece in enumerate(pieces)])
    wanted = torch.stack([softmax_parts(piece, labels, columns * rank) for rank, piece in enumerate(pieces)])
    torch.testing.assert_close(parts, wanted, rtol=1e-5, atol=1e-5)
    assert parts[:, 0].equal(wanted[:, 0])
    assert parts[:, 2].equal(wanted[:, 2])
    losses = []
    for rank, piece in enumerate(pieces):
        expected = cross_entropy_of_parts_(piece.clone(), labels, weights, parts, columns * rank)
        before, elsewhere = piece.clone(), torch.empty_like(piece)
        module.cross_entropy_of_parts_(elsewhere, labels, weights, parts, columns * rank, before)
        losses.append(module.cross_entropy_of_parts_(piece, labels, weights, parts, columns * rank))
        assert bits(elsewhere).equal(bits(piece)), "the gradient beside the logits"
        torch.testing.assert_close(losses[-1], expected, rtol=1e-6, atol=1e-5)
        assert losses[-1].equal(losses[0])
    return losses[0], torch.cat(pieces, 1)


@every_value
@every_dtype
@pytest.mark.parametrize(("shape", "ranks"), [((3, 5), 1), ((4, 128), 2), ((5, 999), 3), ((3, 20_000), 2)], ids=str)
def test_columns_spread_over_ranks_give_what_whole_rows_give(shape, ranks, dtype, triton_device):
    logits = (3 * make("normal", shape, device=triton_device)).to(dtype)
    labels, weights = arguments(logits)
    want = logits.clone()
    expected = twin(want, labels, weights)
    losses, got = spread(logits, ranks, labels, weights)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-5)
    assert_gradient(got, want, weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_shows_on_all(bad, triton_device):
    logits = torch.ones(2, 600, device=triton_device)
    logits[1, 7] = bad
    labels = torch.tensor([1, 500], device=triton_device)
    module = importlib.import_module("msamp.kernels.triton.cross_entropy")
    pieces = [piece.contiguous() for piece in logits.split(300, 1)]
    parts = torch.stack([module.softmax_parts(piece, labels, 300 * rank) for rank, piece in enumerate(pieces)])
    for rank, piece in enumerate(pieces):
        losses = module.cross_entropy_of_parts_(piece, labels, torch.zeros(2, device=triton_device), parts, 300 * rank)
        assert losses.isfinite().tolist() == [True, False]
        assert piece.isfinite().all(1).tolist() == [True, False]


def test_columns_of_minus_infinity_on_a_whole_rank_cost_nothing(triton_device):
    logits = torch.full((1, 600), -math.inf, device=triton_device)
    logits[0, 590:] = 1.0
    labels = torch.tensor([590], device=triton_device)
    losses, got = spread(logits, 2, labels, torch.ones(1, device=triton_device))
    assert losses.item() == pytest.approx(math.log(10))
    assert got[0, :590].count_nonzero() == 0


@pytest.mark.parametrize("label", [-1, 600, 2**40])
def test_a_label_of_no_rank_makes_loss_and_gradient_nan(label, triton_device):
    module = importlib.import_module("msamp.kernels.triton.cross_entropy")
    labels = torch.tensor([599, label], device=triton_device)
    pieces = [torch.ones(2, 300, device=triton_device) for _ in range(2)]
    parts = torch.stack([module.softmax_parts(piece, labels, 300 * rank) for rank, piece in enumerate(pieces)])
    for rank, piece in enumerate(pieces):
        losses = module.cross_entropy_of_parts_(piece, labels, torch.ones(2, device=triton_device), parts, 300 * rank)
        assert losses.isnan().tolist() == [False, True]
        assert piece.isnan().all(1).tolist() == [False, True]


@pytest.mark.gpu
@every_dtype
def test_large_and_spread_on_the_gpu(dtype):
    logits = (torch.randn(2048, 50_304, device="cuda") * 3).to(dtype)
    labels, weights = arguments(logits)
    expected = twin(logits.clone(), labels, weights)
    torch.testing.assert_close(spread(logits, 2, labels, weights)[0], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("vocabulary", [50_257, 50_304])
def test_large_on_the_gpu(dtype, vocabulary):
    assert_same((torch.randn(2048, vocabulary, device="cuda") * 3).to(dtype))
