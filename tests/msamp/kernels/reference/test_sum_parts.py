"""Partial sums added up: against FP64, in every dtype."""

import pytest
import torch

from helpers.numerics import make
from msamp.kernels.reference.sum_parts import sum_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_is_added_up_and_rounded_once(dtype):
    parts = [make("normal", (rows, width), seed=rows) for rows, width in ((1, 40), (70, 3), (5, 1))]
    for x, got in zip(parts, sum_parts(parts, dtype), strict=True):
        assert (got.shape, got.dtype) == (x.shape[1:], dtype)
        torch.testing.assert_close(got.double(), x.double().sum(0), rtol=torch.finfo(dtype).eps, atol=1e-5)
