"""Group Scaling between the halves of layers: who leaves maxima, who finds them, and that no bit depends on them."""

import pytest
import torch

from helpers.block_halves import B, H, S, attention_half, attention_settings, mlp_half, mlp_settings
from helpers.numerics import make
from msamp.kernels import ops
from msamp.nn import block
from msamp.nn.attention_block import AttentionBlock
from msamp.nn.cast_scales import CastScales
from msamp.nn.group_scaling import leave_maxima, maxima_for
from msamp.nn.mlp_block import MLPBlock
from msamp.numerics import recipe
from msamp.numerics.granularity import TENSORWISE

JUST_IN_TIME = CastScales(None, None, None)


class Writer(torch.autograd.Function):
    """The identity; its backward is a kernel that leaves its maxima."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        written = (2 * grad).view(grad.shape)
        return leave_maxima(written, written.abs().amax(-1, keepdim=True))


class Caster(torch.autograd.Function):
    """The identity; its backward looks for maxima, as a cast does."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.found.append((maxima_for(JUST_IN_TIME, grad), grad.clone()))
        return grad, None


def cast_of(use) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What a cast finds of the gradient of its output x, used as `use` says: maxima, and the gradient."""
    found = []
    use(Caster.apply(torch.ones(3, 4, requires_grad=True), found)).sum().backward()
    return found[0]


def test_maxima_go_with_the_gradient_from_one_function_to_the_next():
    maxima, grad = cast_of(Writer.apply)
    assert maxima.equal(grad.abs().amax(-1, keepdim=True))


@pytest.mark.promise("Group scaling", "Gradients that were summed or copied are cast by their own amax.")
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * 2,
        lambda x: Writer.apply(x) + Writer.apply(x),  # autograd adds up in place, in the very tensor that has maxima
        lambda x: Writer.apply(x) + x,
        lambda x: Writer.apply(x.view(-1)),
        lambda x: Writer.apply(x.double()),
    ],
    ids=["no producer", "two producers", "a residual path", "another shape", "another dtype"],
)
def test_copied_gradient_uses_own_amax(use):
    assert cast_of(use)[0] is None


def two_layers(level, device, rms) -> list[torch.Tensor]:
    """The output of two layers of two halves each, and the gradients of their input and all parameters."""
    kind = "swiglu" if rms else "gelu"
    halves = [(attention_half(level, device, bias=not rms), mlp_half(level, device, kind, bias=not rms)) for _ in range(2)]
    x, grad = (make("log-normal", (S, B, H), seed=seed, device=device).bfloat16() for seed in (1, 2))
    out = x.requires_grad_()
    for attention, mlp in halves:
        through, delta = AttentionBlock.apply(out, *attention.arguments(), attention_settings(attention, rms=rms))
        out = MLPBlock.apply(through, delta, *mlp.arguments(), mlp_settings(mlp, kind, rms))
    leaves = [x, *(t for pair in halves for half in pair for t in half.arguments() if t is not None)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.fixture
def asked(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Fills up with the input and the maxima of each cast of a gradient."""
    seen, cast = [], ops.cast_transpose

    def spy(x, *args, **flags):
        if flags.get("col"):
            seen.append((x, flags.get("maxima")))
        return cast(x, *args, **flags)

    monkeypatch.setattr(ops, "cast_transpose", spy)
    return seen


@pytest.mark.promise("Group scaling", "Gradients between fused halves of a layer are cast by maxima without a second read.")
@pytest.mark.parametrize("rms", [False, True], ids=["GELU, LayerNorm", "SwiGLU, RMSNorm"])
def test_two_layers_cast_three_of_four_gradients_by_maxima_and_no_bit_changes(rms, device, asked, monkeypatch):
    found = two_layers(recipe.COAT, device, rms)
    assert [maxima is None for _, maxima in asked] == [True, False, False, False]  # the first gradient comes from outside
    assert all(TENSORWISE.amax(maxima).equal(TENSORWISE.amax(x)) for x, maxima in asked[1:])
    asked.clear()
    monkeypatch.setattr(block, "maxima_for", lambda slot, x: None)
    again = two_layers(recipe.COAT, device, rms)
    assert [maxima for _, maxima in asked] == [None] * 4
    assert all(a.equal(b) for a, b in zip(found, again, strict=True))


@pytest.mark.promise("Group scaling", "Delayed scaling is unchanged.")
def test_delayed_scaling_leaves_none(device, asked):
    two_layers(recipe.O3, device, False)
    assert [maxima for _, maxima in asked] == [None] * 4
