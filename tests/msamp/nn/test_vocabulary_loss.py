"""LM head and cross entropy in chunks: against torch in FP64, whatever the chunks, with masks; what it refuses; its memory."""

from typing import Any

import pytest
import torch
from numerics import KINDS, make, measure
from torch import Tensor
from torch.nn import functional

from msamp.kernels.scaled_mm import fp8_hardware
from msamp.nn import vocabulary_loss
from msamp.nn.vocabulary_loss import chunk_rows, linear_cross_entropy
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import quantize

TOKENS, VOCABULARY, HIDDEN = 300, 60, 16
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


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
    assert got is not None
    assert want is not None
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("rows", [128, 256, 384])
@pytest.mark.parametrize("mask", ["all", "some", "none"])
@every_dtype
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
        assert got.grad is not None
        assert got.grad.dtype is dtype
        near(got.grad, want.grad, 1e-6 if wide else 8e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_logits_are_those_of_the_rounded_operands_and_the_gradients_follow_them(kind: str, dtype: torch.dtype, device: torch.device):
    """Scales are powers of two of each tensor's amax; gradients are 16-bit products of the unrounded operands."""
    hidden, weight, labels, weights = case(dtype, device)
    hidden = make(kind, (TOKENS, HIDDEN), device=device).to(dtype).requires_grad_()
    total, losses = linear_cross_entropy(hidden, weight, labels, weights, fp8=True)
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


def test_fp8_logits_of_what_is_not_finite_show(device: torch.device):
    hidden, weight, labels, weights = case(torch.bfloat16, device)
    with torch.no_grad():
        hidden[3, 5] = torch.inf
    assert linear_cross_entropy(hidden, weight, labels, weights, fp8=True)[0].isnan()


def test_fp8_logits_of_odd_sizes(device: torch.device):
    """The product pads; what is handed on is row-major."""
    hidden, weight, labels, weights = case(torch.bfloat16, device)
    odd = linear_cross_entropy(hidden, weight[:59], labels.clamp(max=58), weights, fp8=True)[1]
    exact_losses = exact(hidden.float(), weight[:59].float(), labels.clamp(max=58), weights)[1]
    torch.testing.assert_close(odd, exact_losses, rtol=0.2, atol=0.5)


def test_the_chunks_do_not_change_a_bit_of_the_losses(device: torch.device):
    """Small integers, so that no product depends on the order in which a GEMM sums."""
    hidden, weight, labels, weights = case(torch.bfloat16, device)
    whole = ((4 * hidden).round().detach(), (4 * weight).round().detach(), labels, weights)
    total, losses = linear_cross_entropy(*whole)
    for rows in (1, 128, 200, 299):
        other, same = linear_cross_entropy(*whole, chunk_bytes(rows, torch.bfloat16))
        assert torch.equal(same, losses)
        assert torch.equal(other, total)


def test_gradients_of_chunks_add_up_in_fp32(device: torch.device):
    """128 times the same token: in BF16 the sum over the chunks would stop growing where a chunk is half a digit of it."""
    hidden, weight = torch.ones(128 * 600, 1, device=device).bfloat16(), torch.zeros(2, 1, device=device).bfloat16().requires_grad_()
    labels = torch.zeros(len(hidden), dtype=torch.int64, device=device)
    total, _ = linear_cross_entropy(hidden, weight, labels, torch.ones(len(hidden), device=device), 128 * 2 * 2)
    total.backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-38400, 38400]


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


def test_without_gradients_the_losses_alone(monkeypatch: pytest.MonkeyPatch):
    products: list[Any] = []
    real = vocabulary_loss._product
    monkeypatch.setattr(vocabulary_loss, "_product", lambda *a, **k: (products.append(a), real(*a, **k)))
    inputs = case()
    total, losses = linear_cross_entropy(*inputs)
    with torch.no_grad():
        quiet, same = linear_cross_entropy(*inputs)
    assert len(products) == 3 + 1
    assert same.equal(losses)
    assert quiet.equal(total.detach())
    assert not quiet.requires_grad


def test_the_gradient_of_the_sum_is_a_factor_in_fp32():
    """1/3 in BF16 would be off by 2^-9 in every element alike; and backward may run again."""
    inputs = case(torch.bfloat16)
    total, _ = linear_cross_entropy(*inputs)
    whole = torch.autograd.grad(total, inputs[:2], retain_graph=True)
    third = torch.autograd.grad(total / 3, inputs[:2])
    for a, b in zip(whole, third, strict=True):
        share = (b.double() * a.double()).sum() / a.double().square().sum()
        assert share.item() == pytest.approx(1 / 3, rel=3e-4)


def test_a_cpu_that_emulates_bf16_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch):
    inputs = case(torch.bfloat16)
    native, _ = linear_cross_entropy(*inputs)
    monkeypatch.setattr(vocabulary_loss, "native_bf16", lambda device: False)
    emulated, _ = linear_cross_entropy(*inputs)
    assert emulated.item() == pytest.approx(native.item(), rel=1e-4)
    emulated.backward()
    wide = in_fp64(*inputs)
    exact(*wide)[0].backward()
    near(inputs[1].grad, wide[1].grad, 8e-3)


def test_small_probabilities_keep_their_gradients_in_fp16(device: torch.device):
    """2,999 classes of probability 2^-26 each: half of what FP16 rounds up to its smallest number."""
    hidden = torch.ones(4, 1, device=device, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(3000, 1, device=device, dtype=torch.float16)
    weight[0] = 18.0
    weight.requires_grad_()
    labels, weights = torch.zeros(4, dtype=torch.int64, device=device), torch.ones(4, device=device)
    total, _ = linear_cross_entropy(hidden, weight, labels, weights)
    (total * 2.0**12).backward()
    theirs = in_fp64(hidden, weight, labels, weights)
    (exact(*theirs)[0] * 2.0**12).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[1:].double(), theirs[1].grad[1:], rtol=2e-3, atol=0.0)


def test_a_gradient_that_overflows_fp16_shows(device: torch.device):
    """A loss scale takes infinities for its sign to fall: the largest FP16 number would pass for a gradient."""
    inputs = case(torch.float16)
    total, _ = linear_cross_entropy(*inputs)
    (total * 2.0**30).backward()
    assert any(x.grad.isinf().any() for x in inputs[:2] if x.grad is not None)


def test_chunks_of_tokens():
    assert chunk_rows(8192, 50304, 2048, 2) == 2048
    assert chunk_rows(8192, 50304, 1024, 4) == 1280  # 7 of at most 256 MiB, rounded up to whole tiles
    assert chunk_rows(8192, 128256, 4096, 2) == 4096  # as large as the weight, whose gradient takes their place
    assert chunk_rows(100, 60, 16, 4) == 100
    assert chunk_rows(300, 60, 16, 4, 1) == 128


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
