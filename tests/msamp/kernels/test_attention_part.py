"""torch's own attention kernels for a part of the keys, against their reference twin."""

import math

import pytest
import torch

from msamp.kernels import attention_part as kernels
from msamp.kernels.reference import attention_part as twin

SCALE = 1 / math.sqrt(128)


def test_a_cpu_runs_the_reference():
    q, k = torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 1, 8)
    for backend in ("auto", "cudnn", "flash", "math"):
        assert kernels.choose(backend, q, k, causal=True) == kernels.MATH


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernels.CUDNN, kernels.FLASH])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(256, 256, True), (256, 128, False), (128, 256, False)])
def test_kernels_agree_with_the_reference(kernel: str, queries: int, keys: int, causal: bool):
    generator = torch.Generator("cuda").manual_seed(2)
    sizes = [(queries, 8), (keys, 2), (keys, 2), (queries, 8)]
    q, k, v, grad = (torch.randn(s, 2, n, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for s, n in sizes)
    assert kernels.choose(kernel, q, k, causal=causal) == kernel
    o, lse = kernels.attention_part(q, k, v, SCALE, causal=causal, kernel=kernel)
    expected, statistics = twin.attention_part(q, k, v, SCALE, causal=causal)
    torch.testing.assert_close(lse, statistics, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
    # A part's backward reads the statistics of the whole: here of a whole with twice the sum of exponentials.
    arguments = (grad, q, k, v, expected, statistics + math.log(2), SCALE)
    exact = twin.attention_part_backward(*arguments, causal=causal)
    for got, wanted in zip(kernels.attention_part_backward(*arguments, causal=causal, kernel=kernel), exact, strict=True):
        assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


@pytest.mark.gpu
def test_a_backend_that_cannot_is_refused_and_auto_falls_back_to_the_reference():
    q, k = torch.zeros(4, 1, 2, 8, device="cuda"), torch.zeros(4, 1, 1, 8, device="cuda")
    with pytest.raises(ValueError, match=r"the cudnn kernel does not support attention of \(4, 1, 2, 8\).*choose auto"):
        kernels.choose("cudnn", q, k, causal=True)
    assert kernels.choose("auto", q, k, causal=True) == kernels.MATH
