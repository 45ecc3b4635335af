import pytest
import torch

from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import TENSORWISE, Group, Tensorwise
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


@pytest.mark.parametrize("shape", [(0,), (0, 7), (4, 0)])
def test_an_empty_tensor_has_amax_zero(shape):
    amax = TENSORWISE.amax(torch.empty(shape))
    assert amax.shape == ()
    assert amax == 0


def test_the_smallest_subnormal_is_seen():
    assert TENSORWISE.amax(torch.tensor([0.0, -(2.0**-149)])) == 2.0**-149


def test_it_takes_no_part_in_autograd():
    x = torch.randn(3, requires_grad=True)
    assert not TENSORWISE.amax(x).requires_grad


def test_all_tensorwise_are_one():
    assert Tensorwise() == TENSORWISE
    assert hash(Tensorwise()) == hash(TENSORWISE)
    assert TENSORWISE != "tensorwise"
    assert repr(TENSORWISE) == "tensorwise"


class Rowwise:
    """What a further granularity brings: nothing but its amax."""

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1, keepdim=True)


def test_another_granularity_enters_by_its_amax_alone():
    x = torch.randn(8, 32) * 10.0 ** torch.arange(-4, 4).view(8, 1)
    scale = scale_from_amax(Rowwise().amax(x), E4M3.max)
    rows = dequantize(quantize(x, scale, E4M3), inverse(scale))
    relative = ((rows - x).norm(dim=-1) / x.norm(dim=-1)).max()
    assert scale.shape == (8, 1)
    assert relative < 0.04


@pytest.mark.parametrize("shape", [(6, 32), (3, 5, 7), (33,), (1,), ()])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_groups_are_runs_of_a_row(shape, size, device):
    x = torch.randn(shape, device=device).bfloat16()
    rows = x.view(-1, shape[-1] if shape else 1)
    runs = [run for row in rows for run in row.split(size)]
    group = Group(size)
    maxima = group.maxima(x)
    assert maxima.dtype == torch.float32
    assert maxima.shape == group.groups(shape) == (*shape[:-1], -(-rows.shape[1] // size))
    assert maxima.flatten().tolist() == [float(run.abs().max()) for run in runs]
    assert group.amax(x).equal(torch.cat([run.abs().max().float().expand(len(run)) for run in runs]).view(shape))
    split = group.split(x, fill=9.0).view(len(rows), -1)
    assert split[:, : rows.shape[1]].equal(rows)
    assert split[:, rows.shape[1] :].eq(9.0).all()


@pytest.mark.parametrize("columns", [64, 50])
def test_groups_do_not_depend_on_a_cut_along_the_first_dimension(columns):
    x = torch.randn(6, columns)
    assert Group(32).maxima(x).equal(torch.cat([Group(32).maxima(part) for part in x.split([1, 3, 2])]))


def test_groups_mark_what_is_not_finite_and_nothing_else():
    x = torch.ones(4, 4)
    x[1, 2], x[3, 0] = float("nan"), -float("inf")
    assert Group(4).maxima(x).flatten().tolist() == [1.0, float("inf"), 1.0, float("inf")]


def test_a_group_of_an_empty_tensor_and_of_no_elements():
    for shape, groups in (((0, 3), (0, 1)), ((3, 0), (3, 0)), ((0,), (0,))):
        assert Group(16).maxima(torch.empty(shape)).shape == groups
        assert Group(16).amax(torch.empty(shape)).shape == shape
    with pytest.raises(ValueError, match=r"group of 0 elements.*at least 1"):
        Group(0)
    assert str(Group(16)) == "group(16)"


def test_groups_keep_small_channels_beside_large_ones():
    x = torch.randn(8, 32) * torch.tensor([1e-4, 1e4]).repeat_interleave(16)
    group = Group(16)
    scale = scale_from_amax(group.amax(x), E4M3.max)
    back = dequantize(quantize(x, scale, E4M3), inverse(scale))
    small, large = ((back - x)[:, part].norm() / x[:, part].norm() for part in (slice(16), slice(16, None)))
    assert max(small, large) < 0.04
