"""The Triton copies and sums of rows bit for bit against their twins: under the interpreter here, compiled on a GPU."""

import importlib

import pytest
import torch

from helpers.choices import each_once
from helpers.numerics import bits, codes, make
from msamp.kernels.reference import permute as twin
from msamp.kernels.reference.group_tokens import group_tokens
from msamp.numerics.formats import E4M3, E5M2


def kernels():
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.permute")


def routed(tokens: int, top_k: int, device, alignment: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, places) of random choices among 6 experts and those of another rank, -1."""
    experts = torch.randint(-1, 6, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).to(device)
    return group_tokens(experts, 6, alignment)[1:]


@each_once(layouts=[(True, False), (False, True), (True, True)], shape=[(30, 24, 2), (130, 70, 1), (5, 144, 3)], fmt=[E4M3, E5M2])
def test_copies(layouts, shape, fmt, triton_device):
    tokens, N, top_k = shape
    x = make("normal", (tokens, N), device=triton_device).to(fmt.dtype)
    source, _ = routed(tokens, top_k, triton_device, alignment=16 if top_k > 1 else 1)
    row, col = layouts
    for got, want in zip(*(f.permute(x, source, top_k, row=row, col=col) for f in (kernels(), twin)), strict=True):
        assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
        assert codes(got).equal(codes(want))


@pytest.mark.parametrize("col", [False, True])
def test_rows_beyond_the_end_are_left_out(col, triton_device):
    x = make("normal", (130, 70), device=triton_device).to(E4M3.dtype)
    source, end = routed(130, 2, triton_device, 128)[0].clone(), torch.tensor([256], dtype=torch.int32, device=triton_device)
    got = kernels().permute(x, source, 2, row=True, col=col, end=end)
    source[256:] = 10**6  # no such pair: reading it would be noticed
    again = kernels().permute(x, source, 2, row=True, col=col, end=end)
    want = kernels().permute(x, source[:256].clone(), 2, row=True, col=col)
    for rows, rows_t in (got, again):
        assert codes(rows[:256]).equal(codes(want[0]))
        if col:
            assert codes(rows_t[:, :256].contiguous()).equal(codes(want[1]))


@each_once(dtype=[torch.bfloat16, torch.float32, torch.float16], shape=[(30, 24, 2), (9, 600, 1), (5, 144, 3)])
def test_sums(dtype, shape, triton_device):
    tokens, N, top_k = shape
    source, places = routed(tokens, top_k, triton_device)
    y = make("log-normal", (source.numel(), N), device=triton_device).clamp(-1e4, 1e4).to(dtype)
    assert bits(kernels().unpermute(y, places)).equal(bits(twin.unpermute(y, places)))


def test_nothing_to_copy_or_add(triton_device):
    x = torch.empty((0, 16), device=triton_device).to(E4M3.dtype)
    source, places = routed(0, 2, triton_device)
    assert [part.shape for part in kernels().permute(x, source, 2, row=True, col=True)] == [(0, 16), (16, 0)]
    assert kernels().unpermute(x.float(), places).shape == (0, 16)


@pytest.mark.gpu
def test_large_on_the_gpu():
    source, places = routed(8192, 8, "cuda", 128)
    x = torch.randn(8192, 2048, device="cuda").to(E5M2.dtype)
    for got, want in zip(*(f.permute(x, source, 8, row=True, col=True) for f in (kernels(), twin)), strict=True):
        assert codes(got).equal(codes(want))
    y = torch.randn(source.numel(), 2048, device="cuda").bfloat16()
    assert kernels().unpermute(y, places).equal(twin.unpermute(y, places))
