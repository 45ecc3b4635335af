import argparse

import pytest
import torch

from tools.bench import bench_attention
from tools.bench.bench_attention import INPUTS, Shape, cases, flops, shape


def test_shapes_are_read_and_wrong_ones_refused():
    assert shape("4x16x2048x128") == Shape(4, 16, 2048, 128, 16)
    assert shape("1x32x8192x128/8").groups == 8
    for text in ("4x16", "0x1x1x16", "axbxcxd"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a shape: give BATCHxHEADSxTOKENSxCHANNELS"):
            shape(text)
    with pytest.raises(argparse.ArgumentTypeError, match="4 heads in 3 groups: give a divisor"):
        shape("1x4x8x16/3")


@pytest.mark.parametrize("kind", INPUTS)
def test_every_case_runs_and_says_what_fp8_loses(kind):
    torch.manual_seed(0)
    found = list(cases(Shape(1, 2, 32, 16, 1), kind, "cpu"))
    assert [(c["what"], c["precision"], c["pass"]) for c, _ in found] == [
        (what, name, passes) for what in ("kernel", "layer") for name in ("bf16", "fp8") for passes in bench_attention.PASSES
    ]
    for columns, run in found:
        run()
        lost = [value for name, value in columns.items() if name.startswith("sqnr")]
        if columns["precision"] == "bf16":
            assert lost == [""] * 4
        else:
            assert min(lost) > (15 if kind == "normal" else 5)


def test_products_are_counted():
    assert flops(Shape(2, 4, 8, 16, 4), "forward") == 2 * 2 * 4 * 64 * 16
    assert flops(Shape(2, 4, 8, 16, 4), "forward and backward") == 3.5 * 2 * 2 * 4 * 64 * 16
