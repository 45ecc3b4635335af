"""A raised layer: the BF16 product of the stored weight's values, the histories that it keeps, and what a watch sees of its casts."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.numerics import make
from msamp.nn.cast_scales import tally_operand_
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, ScalingState
from msamp.numerics import recipe
from msamp.numerics.scaling import Delayed
from msamp.numerics.tensor import PLAIN

every_level = pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)
WINDOW = 2


def layer(level: recipe.Recipe = recipe.O2, dtype=torch.bfloat16, bias: bool = True) -> FP8Linear:
    torch.manual_seed(0)
    return FP8Linear.from_linear(nn.Linear(32, 48, bias, dtype=dtype), level.with_scaling(Delayed(WINDOW)), name="fc")


def run(made: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.detach().requires_grad_()
    y = made(x)
    return (y.detach(), *torch.autograd.grad(y, (x, *made.parameters()), grad))


@every_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_the_bf16_layer_with_the_stored_weight_s_values(level, dtype):
    made = layer(level, dtype)
    made.scaling.raised = True
    x, grad = make("normal", (4, 8, 32), seed=1).to(dtype), make("normal", (4, 8, 48), seed=2).to(dtype)
    y, grad_x, grad_w, grad_b = run(made, x, grad)
    w = made.weight.dequantize(torch.bfloat16).double()
    wide, flat = x.bfloat16().double(), grad.bfloat16().double().flatten(0, 1)
    expected = (wide @ w.t() + made.bias.double(), grad.bfloat16().double() @ w, flat.t() @ wide.flatten(0, 1))
    for found, value in zip((y, grad_x, grad_w), expected, strict=True):
        assert found.dtype == dtype
        assert float((found.double() - value).norm() / value.norm()) < 2.0**-8
    torch.testing.assert_close(grad_b.double(), grad.double().sum((0, 1)), rtol=2.0**-7, atol=0.1)


def test_histories_are_those_of_the_fp8_layer():
    low, raised = layer(), layer()
    raised.scaling.raised = True
    for step in range(WINDOW + 2):
        x, grad = make("normal", (16, 32), seed=step).bfloat16() * 2**step, make("normal", (16, 48), seed=9 + step).bfloat16()
        for made in (low, raised):
            run(made, x, grad)
            ScalingState(made).roll()
    for name, buffer in low.scaling.named_buffers():
        assert torch.equal(buffer, raised.scaling.get_buffer(name)), name
    with torch.no_grad():
        raised(x * 1e3)
    assert not raised.scaling.amax.any(), "an evaluation records nothing"


class _NothingFromTheHost(TorchDispatchMode):
    """Fails where an operator reads a tensor that neither came in nor is a result: one that Python made, which a capture cannot copy."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.alive = list(given)
        self.storages = {x.untyped_storage().data_ptr() for x in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = [x for x in tree_leaves((args, kwargs)) if type(x) in PLAIN]
        strange = [x for x in read if x.numel() and x.untyped_storage().data_ptr() not in self.storages]
        assert not strange, f"{func} reads {strange}"
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        made = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(made) if type(x) in PLAIN]
        self.alive += results  # their memory must not be given to another tensor
        self.storages |= {x.untyped_storage().data_ptr() for x in results}
        return made


@every_level
@pytest.mark.parametrize("watched", [False, True])
def test_no_tensor_comes_from_the_host_so_that_a_cuda_graph_can_hold_a_step(level, watched):
    x, grad = make("normal", (16, 32), seed=1).bfloat16(), make("normal", (16, 48), seed=2).bfloat16()
    made, sums = layer(level), torch.zeros(8, dtype=torch.float64)
    made.scaling.raised = True
    for _ in range(WINDOW):
        run(made, x, grad)
        ScalingState(made).roll()
    if watched:
        made.scaling.checks |= {row: functools.partial(tally_operand_, sums) for row in (INPUT, GRAD_OUTPUT)}
    stored = made.weight.payload, made.weight.scale_inv
    given = (x, grad, sums, made.bias, *stored, *made.scaling.buffers())
    with _NothingFromTheHost(*given):
        run(made, x, grad)
    with pytest.raises(AssertionError, match="reads"), _NothingFromTheHost(*given):
        run(made, x, grad)[0] + torch.tensor([1.0])


@pytest.mark.parametrize("channels", [0, 32])
def test_a_check_sees_the_casts_that_the_fp8_layer_has(channels):
    seen: dict[bool, dict[int, tuple[torch.Tensor, ...]]] = {}
    for raised in (False, True):
        made = layer()
        if channels:
            made.scaling.add_channels(channels)
        x, grad = make("normal", (16, 32), seed=1).bfloat16(), make("normal", (16, 48), seed=2).bfloat16()
        x[:, 3] *= 1000
        for step in range(WINDOW + 1):
            made.scaling.raised = raised
            if step == WINDOW:
                seen[raised] = {}
                for row in (INPUT, GRAD_OUTPUT):
                    made.scaling.checks[row] = lambda *found, row=row, raised=raised: seen[raised].__setitem__(row, found)
            run(made, x, grad)
            ScalingState(made).roll()
        if channels:
            assert float(made.scaling.channels.scale.amax()) > 1
    assert seen[False].keys() == seen[True].keys() == {INPUT, GRAD_OUTPUT}
    for row, found in seen[False].items():
        for one, other in zip(found, seen[True][row], strict=True):
            assert torch.equal(one.float(), other.float())
