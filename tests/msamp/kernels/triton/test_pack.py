"""The Triton casts into one buffer bit for bit against their twin: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import KINDS, bits, make, random_floats
from msamp.kernels.reference.grad_stats import carried
from msamp.kernels.reference.pack import pack as twin
from msamp.kernels.tables import Tables
from msamp.numerics.formats import ALL, E4M3

every_format = pytest.mark.parametrize("fmt", ALL, ids=str)
SHAPES = [(33, 17), (64, 48), (), (0, 4), (3, 5, 7), (20_000,)]


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.pack").pack(*args, **flags)


def assert_same(xs: list[torch.Tensor], fmt, factors: torch.Tensor | None, shift: int = 0) -> None:
    """Every tensor in two runs, the later one first."""
    pieces, start = [], shift
    for i, x in reversed(list(enumerate(xs))):
        for first, end in ((x.numel() // 2, x.numel()), (0, x.numel() // 2)):
            pieces.append((i, first, end - first, start))
            start += end - first
    outs = [torch.zeros(start, dtype=torch.uint8, device=xs[0].device).repeat_interleave(fmt.bytes).view(fmt.dtype) for _ in range(2)]
    kernel(Tables(xs[0].device), xs, pieces, outs[0], factors)
    twin(None, xs, pieces, outs[1], factors)
    assert bits(outs[0]).equal(bits(outs[1]))


@every_value
@every_format
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_all_dtypes(kind, fmt, triton_device):
    dtypes = (torch.float32, torch.bfloat16, torch.float16) * 2
    made = [make(kind, shape or (1,), i).view(shape).clamp(-6e4, 6e4) for i, shape in enumerate(SHAPES)]
    xs = [x.to(triton_device, dtype) for x, dtype in zip(made, dtypes, strict=True)]
    factors = torch.tensor([0.37 * 4.0 ** (2 - i) for i in range(len(xs))], device=triton_device) if fmt.scaled else None
    assert_same(xs, fmt, factors)


@every_format
def test_random_bits_of_all_magnitudes(fmt, triton_device):
    x = random_floats(4096, seed=3).to(triton_device)
    assert_same([x.masked_fill(x.isnan(), -0.0)], fmt, torch.tensor([2.0], device=triton_device) if fmt.scaled else None)


@every_format
def test_nan_stays_nan(fmt, triton_device):  # of what sign and payload may depend on the machine
    x, out = torch.full((20,), float("nan"), device=triton_device), torch.empty(20, dtype=fmt.dtype, device=triton_device)
    kernel(Tables(x.device), [x], [(0, 0, 20, 0)], out, torch.ones(1, device=triton_device) if fmt.scaled else None)
    assert out.float().isnan().all()


def assert_summed_the_same(xs: list[torch.Tensor], fmt, divisor: int, right: list[bool], shift: int = 0) -> None:
    """What ranks sent, summed on the way: a guess, then the factors; buffer and amaxes after each."""
    device, ranks = xs[0].device, len(xs[0])
    pieces, start = [], shift
    for i, x in enumerate(xs):
        pieces.append((i, 0, x.shape[1], start))
        start += x.shape[1]
    factors = torch.tensor([0.5 * 4.0 ** (1 - i) for i in range(len(xs))], device=device)
    guess = torch.where(torch.tensor(right, device=device), factors, factors * 2.0)
    found = []
    for run, tables in ((kernel, Tables(device)), (twin, None)):
        out = torch.zeros(start * fmt.bytes, dtype=torch.uint8, device=device).view(fmt.dtype)
        amaxes = torch.zeros(len(xs), device=device)
        run(tables, xs, pieces, out, guess, amaxes=amaxes, ranks=ranks, divisor=divisor)
        first = out.clone()
        run(tables, xs, pieces, out, factors, unless=guess, ranks=ranks, divisor=divisor)
        found.append((first, out, amaxes))
    for got, want in zip(*found, strict=True):
        assert bits(got).equal(bits(want))


@every_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "divisor"), [(1, 1), (2, 2), (3, 3), (3, 1), (8, 8)])
def test_the_sums_over_ranks_have_the_twin_s_bits(ranks, divisor, kind, triton_device):
    for fmt in ALL[-3:]:
        payloads = [make(kind, (ranks, n), n, triton_device).clamp(-400, 400).to(fmt.dtype) for n in (4096, 33, 5000)]
        assert_summed_the_same(payloads, fmt, divisor, [True, False, True])
        assert_summed_the_same(payloads[:1], fmt, divisor, [False], shift=1)
    assert_summed_the_same([make(kind, (ranks, 500), 0, triton_device)], E4M3, divisor, [True])


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_large_sums_over_ranks_on_the_gpu(ranks):
    payloads = [make("log-normal", (ranks, n), n, "cuda").clamp(-400, 400).to(E4M3.dtype) for n in (2048 * 8192, 4096 * 3001, 77)]
    assert_summed_the_same(payloads, E4M3, ranks, [True, False, True])


def test_runs_that_begin_at_any_byte(triton_device):
    xs = [make("normal", (64, 32), device=triton_device)]
    for shift in (0, 1, 8, 16):
        assert_same(xs, ALL[-2], torch.tensor([2.0], device=triton_device), shift)


def assert_measured_the_same(xs: list[torch.Tensor], factors: torch.Tensor, right: list[bool]) -> None:
    """A guess that is right for some, then again with the factors: buffer, amaxes and tallies after each; each tensor in two runs."""
    device, pieces, start = xs[0].device, [], 0
    for i, x in enumerate(xs):
        for first, end in ((0, x.numel() // 2), (x.numel() // 2, x.numel())):
            pieces.append((i, first, end - first, start))
            start += end - first
    guess = torch.where(torch.tensor(right, device=device), factors, factors * 2.0)
    found = []
    for run, tables in ((kernel, Tables(device)), (twin, None)):
        out = torch.zeros(start, dtype=torch.uint8, device=device).view(E4M3.dtype)
        amaxes, tallies = torch.zeros(len(xs), device=device), torch.zeros(2, len(pieces), 3, dtype=torch.int64, device=device)
        run(tables, xs, pieces, out, guess, amaxes=amaxes, tallies=tallies[0])
        first = out.clone()
        run(tables, xs, pieces, out, factors, tallies=tallies[1], unless=guess)
        told = torch.cat([tallies[:, :, :1].flatten(), *(carried(each[:, 1:]).flatten() for each in tallies)])
        found.append((first, out, amaxes, told))
    for got, want in zip(*found, strict=True):
        assert bits(got).equal(bits(want))
    runs = torch.tensor([i for i, *_ in pieces], device=device)
    assert not tallies[1][torch.tensor(right, device=device)[runs]].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_measured_on_their_way(kind, triton_device):
    dtypes = (torch.float32, torch.bfloat16, torch.float16) * 2
    made = [make(kind, shape or (1,), i).view(shape).clamp(-6e4, 6e4) for i, shape in enumerate(SHAPES)]
    xs = [x.to(triton_device, dtype) for x, dtype in zip(made, dtypes, strict=True)]
    factors = torch.tensor([0.5 * 4.0 ** (2 - i) for i in range(len(xs))], device=triton_device)
    for right in ([True] * 6, [False] * 6, [True, False] * 3):
        assert_measured_the_same(xs, factors, right)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_where_it_is_measured(bad, triton_device):
    x, y = make("normal", (8, 20), device=triton_device).bfloat16(), make("normal", (300,), device=triton_device)
    x[7, 19] = bad
    for run, tables in ((kernel, Tables(x.device)), (twin, None)):
        amaxes, out = torch.zeros(2, device=triton_device), torch.empty(460, dtype=E4M3.dtype, device=triton_device)
        tallies = torch.zeros(2, 3, dtype=torch.int64, device=triton_device)
        run(tables, [x, y], [(0, 0, 160, 0), (1, 0, 300, 160)], out, torch.ones(2, device=triton_device), amaxes=amaxes, tallies=tallies)
        assert amaxes.isinf().tolist() == [True, False]
        largest = tallies[:, 0].to(torch.int32).view(torch.float32).tolist()
        assert largest[0] == (float("inf") if bad != bad else 448)
        assert largest[1] <= 448


@pytest.mark.gpu
def test_large_gradients_are_measured_on_the_gpu():
    xs = [make("log-normal", shape, i, "cuda").bfloat16() for i, shape in enumerate([(2048, 8192), (4096, 3001), (77,)])]
    for right in ([True, True, True], [False, True, False]):
        assert_measured_the_same(xs, torch.tensor([1.0, 0.5, 4.0], device="cuda"), right)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_on_the_gpu(dtype, fmt):
    xs = [make("log-normal", shape, i, "cuda").to(dtype) for i, shape in enumerate([(2048, 8192), (4096, 3001), (77,)])]
    assert_same(xs, fmt, torch.tensor([1.0, 0.5, 3.0], device="cuda") if fmt.scaled else None)
