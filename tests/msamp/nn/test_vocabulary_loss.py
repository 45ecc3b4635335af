"""LM head and cross entropy in chunks: against torch in FP64, whatever the chunks, with masks; what it refuses; its memory."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.choices import each_value
from helpers.numerics import KINDS, make, measure
from msamp.kernels.scaled_mm import fp8_hardware
from msamp.nn import vocabulary_loss
from msamp.nn.vocabulary_loss import causal_lm_loss, linear_cross_entropy
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.quantize import quantize

TOKENS, VOCABULARY, HIDDEN = 300, 60, 16


def case(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", mask: str = "some") -> tuple[Tensor, ...]:
    """hidden, weight, labels and weights; two operands that want gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden = make("normal", (TOKENS, HIDDEN), device=device).to(dtype).requires_grad_()
    weight = (0.5 * make("normal", (VOCABULARY, HIDDEN), seed=2, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    weights = (torch.rand(TOKENS, generator=generator) < {"all": 1.0, "some": 0.7, "none": 0.0}[mask]).float()
    return hidden, weight, labels.to(device), weights.to(device)


def exact(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum, with gradient, and the losses, by torch."""
    losses = functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    return (losses * weights).sum(), losses


def in_fp64(hidden: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), *rest)


def chunk_bytes(rows: int, dtype: torch.dtype) -> int:
    return rows * VOCABULARY * dtype.itemsize


def near(got: Tensor | None, want: Tensor | None, tolerance: float) -> None:
    assert (got.double() - want).norm() <= tolerance * want.norm()


@each_value(rows=[128, 256, 384], mask=["all", "some", "none"], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch_in_fp64(dtype: torch.dtype, mask: str, rows: int, device: torch.device):
    mine = case(dtype, device, mask)
    theirs = in_fp64(*mine)
    total, losses = linear_cross_entropy(*mine, chunk_bytes(rows, dtype))
    expected, expected_losses = exact(*theirs)
    assert (total.shape, total.dtype, losses.shape, losses.dtype) == ((), torch.float32, (TOKENS,), torch.float32)
    assert total.requires_grad
    assert not losses.requires_grad
    wide = dtype is torch.float32
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5 if wide else 2**-8, atol=1e-5 if wide else 2**-5)
    assert total.item() == pytest.approx((losses * mine[3]).sum().item(), rel=1e-6)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5 if wide else 1e-3)
    factor = 1 / mine[3].sum().clamp(min=1)
    (total * factor).backward()
    (expected * factor).backward()
    for got, want in zip(mine[:2], theirs[:2], strict=True):
        assert got.grad.dtype is dtype
        near(got.grad, want.grad, 1e-6 if wide else 8e-3)


@each_value(kind=KINDS, dtype=[torch.float32, torch.bfloat16])
def test_fp8_logits_are_those_of_the_rounded_operands_and_the_gradients_follow_them(kind: str, dtype: torch.dtype, device: torch.device):
    """Scales are powers of two of each tensor's amax; gradients are 16-bit products of the unrounded operands."""
    hidden, weight, labels, weights = case(dtype, device)
    hidden = make(kind, (TOKENS, HIDDEN), device=device).to(dtype).requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, labels, weights, precision="fp8")
    total.backward()
    rounded = []
    for x in (hidden, weight):
        scale = 2.0 ** torch.floor(torch.log2(448 / x.detach().abs().amax().double()))
        rounded.append(quantize(x.detach(), scale.float(), E4M3).double() / scale)
    logits = (rounded[0] @ rounded[1].t()).requires_grad_()
    expected = functional.cross_entropy(logits, labels, reduction="none")
    (expected * weights).sum().backward()
    wide = dtype is torch.float32
    # Of the logits themselves. FP8 tensor cores add up with some 14 bits: off by 2^-12.2 of the largest on an H200.
    summed = wide and not fp8_hardware(device)
    rounding = 2.0 ** (-20 if summed else -11 if wide else -8) * logits.detach().abs().amax().item()
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=2 * rounding)
    near(hidden.grad, logits.grad @ weight.detach().double(), 1e-4 if summed else 0.1)
    near(weight.grad, logits.grad.t() @ hidden.detach().double(), 1e-4 if summed else 0.1)
    found = measure((hidden.detach().double() @ weight.detach().double().t()), logits.detach())
    assert found.sqnr_db > 20  # both operands round to 3 bits
    plain = linear_cross_entropy(hidden, weight, labels, weights)[1]
    assert not plain.equal(losses)


def rounded(x: Tensor, fmt: Format, largest: float | None = None) -> Tensor:
    """FP64: `x` rounded into `fmt` with the power of two below its largest value, or that of `largest`."""
    amax = x.detach().abs().amax().double() if largest is None else torch.tensor(largest, dtype=torch.float64)
    scale = 2.0 ** torch.floor(torch.log2(fmt.max / amax))
    return quantize(x.detach().float(), scale.float().to(x.device), fmt).double() / scale.to(x.device)


@each_value(largest=[1.0, 12.0, 2.0 ** (-9)], kind=KINDS)
def test_fp8_gradients_are_products_of_the_rounded_operands(kind: str, largest: float, device: torch.device):
    """Gradients of logits have the scale of the largest weight, whatever they are."""
    hidden, weight, labels, weights = case(torch.float32, device)
    hidden, weights = make(kind, (TOKENS, HIDDEN), device=device).requires_grad_(), largest * weights
    total, _ = linear_cross_entropy(hidden, weight, labels, weights, chunk_bytes(256, torch.float32), precision="fp8-all")
    (total / 3).backward()
    narrow = [rounded(x, E4M3) for x in (hidden, weight)]
    logits = (narrow[0] @ narrow[1].t()).requires_grad_()
    (functional.cross_entropy(logits, labels, reduction="none") * weights).sum().backward()
    g = rounded(logits.grad, E5M2, largest)
    summed = 0.02 if fp8_hardware(device) else 2e-3  # an ulp of FP32 in the logits moves a few codes
    near(hidden.grad, g @ narrow[1] / 3, summed)
    near(weight.grad, g.t() @ narrow[0] / 3, summed)


def test_with_all_products_in_fp8_chunks_change_no_bit_of_the_weights_gradient(device: torch.device):
    """Its product runs over all tokens at once; and the losses are those of FP8 logits."""
    hidden, weight, labels, weights = case(torch.bfloat16, device)
    found = []
    for rows in (128, 256, 384):
        total, losses = linear_cross_entropy(hidden, weight, labels, weights, rows * VOCABULARY * 4, precision="fp8-all")
        found.append((losses, *torch.autograd.grad(total, (hidden, weight), retain_graph=True)))
        for again, first in zip(torch.autograd.grad(total, (hidden, weight)), found[-1][1:], strict=True):
            assert again.equal(first)
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert fp8_hardware(device) or mine.equal(first)
    fp8 = linear_cross_entropy(hidden, weight, labels, weights, precision="fp8")[1]
    quiet = linear_cross_entropy(hidden.detach(), weight.detach(), labels, weights, precision="fp8-all")[1]
    assert fp8.equal(quiet)
    torch.testing.assert_close(found[0][0], fp8, rtol=0, atol=2**-6)


def test_the_chunks_do_not_change_a_bit_of_the_losses(device: torch.device):
    """Small integers, so that no product depends on the order in which a GEMM sums."""
    hidden, weight, labels, weights = case(torch.bfloat16, device)
    whole = ((4 * hidden).round().detach(), (4 * weight).round().detach(), labels, weights)
    total, losses = linear_cross_entropy(*whole)
    for rows in (1, 128, 200, 299):
        other, same = linear_cross_entropy(*whole, chunk_bytes(rows, torch.bfloat16))
        assert torch.equal(same, losses)
        assert torch.equal(other, total)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_gradients_that_are_wanted(wanted: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch):
    products: list[Any] = []
    real = vocabulary_loss._product
    monkeypatch.setattr(vocabulary_loss, "_product", lambda *a, **k: (products.append(a), real(*a, **k)))
    both, one = case(), case()
    for x, needed in zip(one, wanted, strict=False):
        x.requires_grad_(needed)
    linear_cross_entropy(*both)[0].backward()
    assert len(products) == 3
    linear_cross_entropy(*one)[0].backward()
    assert len(products) == 3 + 2
    for x, same, needed in zip(one, both, wanted, strict=False):
        assert x.grad.equal(same.grad) if needed else x.grad is None


@pytest.mark.parametrize("trained", [True, False])
def test_chunks_grow_with_the_weight_only_where_its_gradient_takes_their_place(monkeypatch: pytest.MonkeyPatch, trained: bool):
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 1)
    hidden = torch.randn(300, 200)
    weight, labels = torch.randn(60, 200, requires_grad=trained), torch.zeros(300, dtype=torch.int64)
    rows = []

    def counted(logits: Tensor, *others: Tensor) -> Tensor:
        rows.append(len(logits))
        return vocabulary_loss.ops.cross_entropy_(logits, *others)

    linear_cross_entropy(hidden, weight, labels, torch.ones(300), cross_entropy=counted)
    assert rows == ([256, 44] if trained else [128, 128, 44])


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ("fp16", torch.bfloat16, "precision is 'fp16'; choose one of bf16, fp8, fp8-all"),
        ("fp8-all", torch.float16, "precision fp8-all requires torch.bfloat16 or torch.float32, but hidden is torch.float16; choose fp8"),
    ],
)
def test_a_precision_that_the_head_has_not_is_refused(precision: str, dtype: torch.dtype, message: str):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*case(dtype), precision=precision)


BAD = {
    "FP64": (lambda h, w, y, m: (h.double(), w.double(), y, m), r"hidden is torch.float64 and weight torch.float64; both must be"),
    "mixed": (lambda h, w, y, m: (h.bfloat16(), w, y, m), r"hidden is torch.bfloat16 and weight torch.float32; both must be"),
    "shape": (lambda h, w, y, m: (h, w.t(), y, m), r"hidden is \[300, 16\] and weight \[16, 60\]; they must be \[T, h\]"),
    "empty": (lambda h, w, y, m: (h[:0], w, y[:0], m[:0]), r"hidden is \[0, 16\].*T at least 1"),
    "labels": (lambda h, w, y, m: (h, w, y.int(), m), r"labels is \[300\] torch.int32; it must be \[300\] torch.int64"),
    "weights": (lambda h, w, y, m: (h, w, y, m[1:]), r"weights is \[299\] torch.float32; it must be \[300\] torch.float32"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_go_together_is_refused(what: str):
    spoil, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*spoil(*case()))


@pytest.mark.gpu
def test_memory_at_the_size_of_gpt_1_3b():
    """Gradients in FP32 (444 MiB) and beside them the larger of a chunk of logits (197 MiB) and the gradients in BF16 (222 MiB)."""
    tokens, vocabulary, size = 8192, 50304, 2048
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, size, device="cuda")).bfloat16().requires_grad_()
    labels, weights = torch.randint(0, vocabulary, (tokens,), device="cuda"), torch.ones(tokens, device="cuda")
    for _ in range(2):  # the first may allocate a workspace of cuBLAS
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total, _ = linear_cross_entropy(hidden, weight, labels, weights)
        forward = torch.cuda.max_memory_allocated() - before
        (total / tokens).backward()
        peak = torch.cuda.max_memory_allocated() - before
    gradients = 4 * (tokens + vocabulary) * size
    assert forward <= gradients + 2 * 2048 * vocabulary + 8 * 2**20
    assert peak <= gradients + gradients // 2 + 8 * 2**20
    assert peak < 0.4 * 6 * tokens * vocabulary, "of logits in BF16 and FP32"
    want = (functional.cross_entropy((hidden[:512] @ weight.t()).float(), labels[:512], reduction="none") * weights[:512]).sum()
    assert linear_cross_entropy(hidden[:512], weight, labels[:512], weights[:512])[0].item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("held", ["logits", "a view", "the graph", "hooks", "nothing"])
def test_the_gradient_of_logits_takes_their_memory_if_nothing_else_holds_it(held: str, monkeypatch: pytest.MonkeyPatch):
    hidden, weight, labels, _ = case(torch.bfloat16)
    found, kernel = [], vocabulary_loss.ops.cross_entropy_of_parts_
    noted = lambda grad, *args: (found.append(grad is args[-1]), kernel(grad, *args))  # noqa: E731
    monkeypatch.setattr(vocabulary_loss.ops, "cross_entropy_of_parts_", noted)
    logits, grads = hidden @ weight.t(), []
    logits.register_hook(grads.append)
    want = logits.detach().float().clone().requires_grad_()
    functional.cross_entropy(want, labels, ignore_index=9).backward()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if held == "hooks" else contextlib.nullcontext()
    with hooks:
        loss = causal_lm_loss(logits, None, VOCABULARY, ignore_index=9, shift_labels=labels)
    kept = {"logits": logits, "a view": logits[:]}.get(held)
    del logits
    loss.backward(retain_graph=held == "the graph")
    assert found == [held == "nothing"]
    assert kept is None or kept.float().equal(want)
    near(grads[0].float(), want.grad, 2**-7)
