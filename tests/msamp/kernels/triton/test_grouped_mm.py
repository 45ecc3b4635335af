"""Grouped GEMMs in Triton against their twins, bit for bit where every sum is exact: under the interpreter here, compiled on a GPU."""

import importlib
import itertools

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import bits, make
from msamp.kernels.reference import grouped_mm as twin
from msamp.kernels.reference.grouped_mm import GROUP_ALIGNMENT
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.metrics import sqnr_db

M, N, K = 150, 80, 96
LOADS = [[60, 60, 131], [0, 150], [150, 150, 150], [0, 0], [1, 2, 70, 70, 149]]
# Fast accumulation, loads by the copy engine, halves of a tile's rows and columns.
VARIANTS = [(True, True, 1, 1), (False, True, 1, 2), (False, False, 2, 1), (True, False, 1, 2)]

TILINGS = [{}, {"halves_n": 2}, {"tma": False}, {"halves_m": 2}]


def kernels():
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.grouped_mm")


def integers(shape: tuple[int, ...], fmt, seed: int, device) -> torch.Tensor:
    """FP8 integers from -4 to 4: their products and sums are exact in FP32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(fmt.dtype).to(device)


def small(**changes):
    """A tiling of small blocks, so that these shapes have many, and some that are not full."""
    return kernels().Tiling(**({"block_m": 64, "block_n": 32, "block_k": 64, "warps": 4, "group": 2, "stages": 2} | changes))


def tiled(name: str, *args, tiling, **flags):
    """Run a product with this tiling instead of the one that `tiling_of` chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels(), "tiling_of", lambda *_, **__: tiling)
        return getattr(kernels(), name)(*args, **flags)


@each_once(ends=LOADS, variant=VARIANTS, fmt=[E4M3, E5M2])
def test_every_expert_s_rows(ends, variant, fmt, triton_device):
    fast, tma, *halves = variant
    offsets = torch.tensor(ends, dtype=torch.int32, device=triton_device)
    a, b = integers((M, K), fmt, 0, triton_device), integers((len(ends), N, K), E4M3, 1, triton_device)
    scales = torch.tensor(0.5, device=triton_device), torch.arange(1, len(ends) + 1, device=triton_device).float()
    got = tiled(
        "grouped_mm", a, b, offsets, *scales, torch.float32, fast_accum=fast, tiling=small(tma=tma, halves_m=halves[0], halves_n=halves[1])
    )
    want = twin.grouped_mm(a, b, offsets, *scales, torch.float32, fast_accum=fast)
    assert bits(got[: ends[-1]]).equal(bits(want[: ends[-1]]))


@each_once(ends=LOADS, variant=VARIANTS, fmt=[E4M3, E5M2])
def test_every_expert_s_weight_gradient(ends, variant, fmt, triton_device):
    fast, _, *halves = variant
    offsets = torch.tensor(ends, dtype=torch.int32, device=triton_device)
    a_t, b_t = (integers((width, M + 10), f, i, triton_device)[:, :M] for i, (width, f) in enumerate(((N, fmt), (K, E4M3))))
    scales = torch.tensor(0.5, device=triton_device), torch.tensor(2.0, device=triton_device)
    tiling = small(halves_m=halves[0], halves_n=halves[1])
    got = tiled("grouped_mm_grad_weight", a_t, b_t, offsets, *scales, torch.float32, fast_accum=fast, tiling=tiling)
    assert bits(got).equal(bits(twin.grouped_mm_grad_weight(a_t, b_t, offsets, *scales, torch.float32, fast_accum=fast)))


@each_once(fast=[False, True], tiling=TILINGS)
def test_padded_groups_are_loaded_by_the_copy_engine(fast, tiling, triton_device):
    ends = [n * GROUP_ALIGNMENT for n in (0, 1, 1, 2)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=triton_device)
    a_t, b_t = (integers((32, 3 * GROUP_ALIGNMENT), E4M3, seed, triton_device) for seed in (0, 1))
    one = torch.ones((), device=triton_device)
    flags = {"fast_accum": fast, "aligned": True, "tiling": small(block_k=128, **tiling)}
    got = tiled("grouped_mm_grad_weight", a_t, b_t, offsets, one, one, torch.float32, **flags)
    assert got.equal(twin.grouped_mm_grad_weight(a_t, b_t, offsets, one, one, torch.float32, fast_accum=False))


def test_what_is_outside_of_a_group_is_not_read_into_it(triton_device):
    offsets = torch.tensor([30, 30, 100], dtype=torch.int32, device=triton_device)
    a_t, b_t = (torch.full((32, 128), float("nan"), device=triton_device) for _ in range(2))
    for x in (a_t, b_t):
        x[:, :30] = x[:, 30:100] = 1.0
    a_t[:, 30:100] = 2.0
    payloads = a_t.to(E5M2.dtype), b_t.to(E4M3.dtype)
    one = torch.ones((), device=triton_device)
    got = tiled("grouped_mm_grad_weight", *payloads, offsets, one, one, torch.float32, fast_accum=False, tiling=small())
    assert [got[e].unique().tolist() for e in range(3)] == [[30.0], [0.0], [140.0]]


def test_operands_that_the_copy_engine_cannot_load(triton_device):
    a, b = integers((20, 24), E4M3, 0, triton_device), integers((2, 8, 24), E4M3, 1, triton_device)
    offsets, ones = torch.tensor([7, 20], dtype=torch.int32, device=triton_device), torch.ones(2, device=triton_device)
    got = tiled("grouped_mm", a, b, offsets, ones[0], ones, torch.bfloat16, fast_accum=True, tiling=small())
    assert got.equal(twin.grouped_mm(a, b, offsets, ones[0], ones, torch.bfloat16, fast_accum=True))


@pytest.mark.parametrize("shape", [(0, 8, 16), (4, 0, 16), (4, 8, 0)], ids=str)
def test_nothing_to_multiply(shape, triton_device):
    rows, n, k = shape
    a, b = integers((rows, k), E4M3, 0, triton_device), integers((2, n, k), E4M3, 1, triton_device)
    offsets, ones = torch.tensor([rows // 2, rows], dtype=torch.int32, device=triton_device), torch.ones(2, device=triton_device)
    got = tiled("grouped_mm", a, b, offsets, ones[0], ones, torch.float32, fast_accum=False, tiling=small())
    assert got.equal(torch.zeros(rows, n, device=triton_device))
    a_t, b_t = integers((n, rows), E4M3, 0, triton_device), integers((k, rows), E4M3, 1, triton_device)
    got = tiled("grouped_mm_grad_weight", a_t, b_t, offsets, ones[0], ones[0], torch.float32, fast_accum=False, tiling=small())
    assert got.equal(torch.zeros(2, n, k, device=triton_device))


@each_once(ends=[*LOADS, [1] * 5, [40, 80, 400]], block=[16, 64, 128])
def test_the_schedule_is_the_twin_s(ends, block, triton_device):
    offsets = torch.tensor(ends, dtype=torch.int32, device=triton_device)
    assert kernels().grouped_tiles(offsets, M, block).cpu().equal(twin.grouped_tiles(offsets.cpu(), M, block))


def test_a_schedule_may_be_shared(triton_device):
    offsets, ones = torch.tensor([70, 150], dtype=torch.int32, device=triton_device), torch.ones(2, device=triton_device)
    a, b = integers((M, K), E4M3, 0, triton_device), integers((2, 16, K), E4M3, 1, triton_device)
    tiles = kernels().grouped_tiles(offsets, M, 64)
    run = [
        tiled("grouped_mm", a, b, offsets, ones[0], ones, torch.float32, fast_accum=True, tiles=given, tiling=small())
        for given in (tiles, None)
    ]
    assert run[0].equal(run[1])


def test_a_shared_schedule_fits_every_tiling():
    for product, fast, aligned, summed in itertools.product(("rows", "grad_weight"), (True, False), (True, False), (64, 4096)):
        assert kernels().tiling_of(product, summed, torch.device("cpu"), fast_accum=fast, aligned=aligned).block_m == GROUP_ALIGNMENT


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ends", [[4096, 4096, 8192], [1, 130, 130, 5000, 8000]], ids=str)
def test_large_on_the_gpu_captured_in_a_graph(ends, fast):
    rows, n, k, experts = 8192, 1536, 2048, len(ends)
    offsets, ones = torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.ones(experts, device="cuda")
    x, g, w = (make("normal", shape, seed=i, device="cuda") for i, shape in enumerate(((rows, k), (rows, n), (experts, n, k))))
    x, g, w = x.to(E4M3.dtype), g.to(E5M2.dtype), w.to(E4M3.dtype)

    def run():
        y = kernels().grouped_mm(x, w, offsets, ones[0], ones, torch.bfloat16, fast_accum=fast)
        g_t, x_t = g.t().contiguous(), x.t().contiguous()
        return y, kernels().grouped_mm_grad_weight(g_t, x_t, offsets, ones[0], ones[0], torch.float32, fast_accum=fast)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    want = (
        twin.grouped_mm(x, w, offsets, ones[0], ones, torch.bfloat16, fast_accum=fast),
        twin.grouped_mm_grad_weight(g.t(), x.t(), offsets, ones[0], ones[0], torch.float32, fast_accum=fast),
    )
    assert sqnr_db(want[0][: ends[-1]], got[0][: ends[-1]]) > 45
    assert sqnr_db(want[1], got[1]) > (45 if fast else 60)
