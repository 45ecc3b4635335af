import pytest
import torch

from helpers.choices import each_value
from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import TENSORWISE, Block, Group
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.scaling import inverse, scale_from_amax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_the_largest_magnitude(dtype, device):
    x = torch.randn(37, 19, device=device).to(dtype)
    x[3, 4] = -50.0
    amax = TENSORWISE.amax(x)
    assert amax.dtype == torch.float32
    assert amax.shape == ()
    assert amax.device.type == device.type
    assert amax == 50.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_anything_not_finite_becomes_infinity(bad, device):
    x = torch.randn(33, 5, device=device)
    x[7, 2] = bad
    assert TENSORWISE.amax(x) == float("inf")


class Rowwise:
    """What a further granularity brings."""

    def __repr__(self) -> str:
        return "rowwise"

    def maxima(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1)

    def scales_shape(self, shape) -> tuple[int, ...]:
        return tuple(shape[:-1])

    def spread(self, values: torch.Tensor, shape) -> torch.Tensor:
        return values.unsqueeze(-1)


@pytest.mark.parametrize("granularity", [TENSORWISE, Group(16), Block(1, 16), Block(3, 5), Rowwise()], ids=str)
def test_a_granularity_gives_one_value_a_set_and_spreads_it(granularity):
    x = torch.randn(8, 32) * 10.0 ** torch.arange(-4, 4).view(8, 1)
    maxima = granularity.maxima(x)
    assert maxima.shape == granularity.scales_shape(x.shape)
    assert bool((granularity.spread(maxima, x.shape) >= x.abs()).all())
    scale = granularity.spread(scale_from_amax(maxima, E4M3.max), x.shape)
    back = dequantize(quantize(x, scale, E4M3), inverse(scale))
    assert (back - x).norm() / x.norm() < 0.04


@each_value(shape=[(6, 32), (3, 5, 7), (33,), (1,), ()], size=[1, 4, 16])
def test_groups_are_runs_of_a_row(shape, size, device):
    x = torch.randn(shape, device=device).bfloat16()
    rows = x.view(-1, shape[-1] if shape else 1)
    runs = [run for row in rows for run in row.split(size)]
    group = Group(size)
    maxima = group.maxima(x)
    assert maxima.dtype == torch.float32
    assert maxima.shape == group.scales_shape(shape) == (*shape[:-1], -(-rows.shape[1] // size))
    assert maxima.flatten().tolist() == [float(run.abs().max()) for run in runs]
    assert group.spread(maxima, shape).equal(torch.cat([run.abs().max().float().expand(len(run)) for run in runs]).view(shape))
    split = group.split(x, fill=9.0).view(len(rows), -1)
    assert split[:, : rows.shape[1]].equal(rows)
    assert split[:, rows.shape[1] :].eq(9.0).all()


def test_groups_mark_what_is_not_finite_and_nothing_else():
    x = torch.ones(4, 4)
    x[1, 2], x[3, 0] = float("nan"), -float("inf")
    assert Group(4).maxima(x).flatten().tolist() == [1.0, float("inf"), 1.0, float("inf")]


@each_value(shape=[(7, 9), (8, 8), (1, 1), (2, 5, 6), (4,)], block=[Block(4, 4), Block(3, 5), Block(128, 128), Block(4, 1)])
def test_blocks_are_tiles_of_a_matrix_and_the_last_may_be_short(shape, block, device):
    x = torch.randn(shape, device=device).bfloat16()
    maxima, spread = block.maxima(x), block.spread(block.maxima(x), shape)
    assert maxima.dtype == torch.float32
    matrices = x.reshape(-1, *((1, 1, *shape)[-2:]))
    tables, spreads = maxima.reshape(len(matrices), -1, maxima.shape[-1]), spread.reshape(matrices.shape)
    for matrix, table, values in zip(matrices, tables, spreads, strict=True):
        for i, rows in enumerate(matrix.split(block.rows)):
            for k, tile in enumerate(rows.split(block.columns, 1)):
                assert table[i, k] == tile.abs().max()
                at = values[i * block.rows :, k * block.columns :][: tile.shape[0], : tile.shape[1]]
                assert at.eq(table[i, k]).all()


def test_blocks_mark_what_is_not_finite_and_nothing_else():
    x = torch.ones(4, 4)
    x[1, 2], x[3, 0] = float("nan"), -float("inf")
    assert Block(2, 2).maxima(x).tolist() == [[1.0, float("inf")], [float("inf"), 1.0]]
