"""The GEMM room: operands of every granularity, the three GEMMs, and what a layer refuses."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from helpers.choices import every_value
from helpers.definitions import dequantize_blocks
from helpers.numerics import codes, make
from msamp.kernels import ops
from msamp.nn.block import vector_gradients
from msamp.nn.cast_checks import check_gemm, check_smooth, wire_cast
from msamp.nn.cast_scales import CastScales
from msamp.nn.gemm import LayerGemm, Operand, cast_operand
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics import recipe
from msamp.numerics.block_scale import quantize_blocks
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import dequantize, quantize
from msamp.numerics.recipe import GEMMS, Cast, Gemms, Product
from msamp.numerics.scaling import Current, Delayed, Scaling, inverse, scale_from_amax


def layer(level=recipe.O2, features=(32, 48), dtype=torch.float32, device="cpu") -> FP8Linear:
    torch.manual_seed(0)
    return FP8Linear.from_linear(nn.Linear(*features, bias=False, dtype=dtype).to(device), level)


@pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_the_weight_operand_in_both_layouts(level):
    low = layer(level)
    weight = low.weight.detach()
    gemm = LayerGemm.of(low.scaling, weight)
    w8, w8_t = gemm.weight(weight.payload).payload, gemm.weight(weight.payload, transpose=True).payload
    assert (w8.shape, w8_t.shape) == ((48, 32), (32, 48))
    assert w8_t.is_contiguous()
    assert codes(w8_t).equal(codes(w8).t())


def test_a_shared_amax_decides_the_scale_just_in_time_and_no_other():
    x, asked = make("normal", (16, 8)), []

    def combine(amax: torch.Tensor) -> torch.Tensor:
        asked.append(float(amax))
        return amax * 64

    recorded = torch.zeros(())
    cast = Cast(E4M3)
    payload, _, scale_inv, *_ = cast_operand(x, CastScales(None, None, recorded), cast, combine=combine)
    own_inv = cast_operand(x * 64, CastScales(None, None, None), cast).scale_inv
    assert asked == [x.abs().max()]
    assert recorded == 64 * x.abs().max()
    assert scale_inv == own_inv
    assert codes(payload).equal(codes(quantize(x, inverse(own_inv), E4M3)))
    assert cast_operand(x, CastScales(None, None, None), cast, combine=lambda amax: amax / 0).scale_inv.isnan()
    known = CastScales(torch.tensor(2.0), torch.tensor(0.5), recorded)
    assert cast_operand(x, known, cast, combine=combine).scale_inv == 0.5
    assert len(asked) == 1


@pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_the_gemms_are_those_of_the_layer(level, device):
    torch.manual_seed(0)
    layer = FP8Linear.from_linear(nn.Linear(64, 48, dtype=torch.bfloat16).to(device), level)
    x = make("normal", (32, 64), device=device).to(torch.bfloat16).requires_grad_()
    g = make("normal", (32, 48), seed=1, device=device).to(torch.bfloat16)
    y = layer(x)
    y.backward(g)
    gemm, payload = LayerGemm.of(layer.scaling, layer.weight), layer.weight.payload
    x8, x8_t, x_scale_inv, _ = ops.cast_transpose(x.detach(), None, None, gemm.x_dtype, row=True, col=True, colsum=False)
    g8, g8_t, g_scale_inv, sums = ops.cast_transpose(g, None, None, gemm.grad_dtype, row=True, col=True, colsum=True)
    xs = Operand.tensorwise(x8, scale_inv=x_scale_inv, payload_t=x8_t)
    gs = Operand.tensorwise(g8, scale_inv=g_scale_inv, payload_t=g8_t)
    assert gemm.output(xs, gemm.weight(payload), layer.bias, x.dtype).equal(y)
    assert gemm.grad_input(gs, gemm.weight(payload, transpose=True), x.dtype).equal(x.grad)
    assert gemm.grad_weight(gs, xs, torch.bfloat16).equal(layer.weight.grad)
    assert vector_gradients((sums, layer.bias))[0].equal(layer.bias.grad)


@dataclass(frozen=True)
class Halved(Scaling):
    """A rule of one's own without history: half of the scale that would just fit."""

    window: int = 0

    def next_scale(self, history, fp_max, last=1.0):
        return scale_from_amax(history[..., -1], fp_max / 2, last)


GROUPS = Gemms.of(Cast(E4M3, Current(), Group(8)), Cast(E4M3, Current(), Group(8)), Cast(E5M2, Halved(), Group(8)))


def rounded(x, cast):
    """`x` as its operand stands for it, groups along the last dimension."""
    scale = cast.scaling.next_scale(cast.granularity.maxima(x).unsqueeze(-1), cast.format.max)
    return dequantize(quantize(x, cast.granularity.spread(scale, x.shape), cast.format), cast.granularity.spread(inverse(scale), x.shape))


@pytest.mark.parametrize("level", [recipe.O2, recipe.O3], ids=lambda r: r.name)
def test_a_granularity_of_ones_own_is_cast_by_its_definition_along_what_each_gemm_sums_over(level):
    low = layer(level.with_gemm(GROUPS))
    x, g = make("log-normal", (24, 32)).requires_grad_(), make("normal", (24, 48), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = low(x)
        y.backward(g)
    w = low.weight.detach().dequantize()
    a, b, c = GROUPS.input, GROUPS.weight, GROUPS.grad_output
    v = x.detach()
    assert torch.allclose(y, rounded(v, a) @ rounded(w, b).t(), rtol=1e-6, atol=1e-6)
    assert torch.allclose(x.grad, rounded(g, c) @ rounded(w.t(), b).t(), rtol=1e-6, atol=1e-6)
    assert torch.allclose(low.weight.grad, rounded(g.t(), c) @ rounded(v.t(), a).t(), rtol=1e-6, atol=1e-6)


def along(x, cast, rule):
    """What `cast` leaves of `x`, blocks along its last dimension: the definition."""
    return dequantize_blocks(*quantize_blocks(x, cast.granularity, cast.format, rule), cast.granularity)


BLOCKWISE = {"blockwise": "fp32", "blockwise-power-of-two": "power-of-two", "mxfp8": "e8m0", "mxfp8-round-up": "e8m0-up"}


@every_value
@pytest.mark.parametrize(("name", "rule"), BLOCKWISE.items())
@pytest.mark.parametrize("kind", ["normal", "channel-outlier", "log-normal"])
def test_blockwise_recipes_multiply_what_the_definition_casts(name, rule, kind, device):
    level = recipe.O2.with_gemm(recipe.GEMMS[name])
    low, gemm = layer(level, (192, 160), device=device), level.gemm
    x, g = make(kind, (144, 192), device=device).requires_grad_(), make(kind, (144, 160), seed=1, device=device)
    y = low(x)
    y.backward(g)
    w, v = low.weight.detach().dequantize(), x.detach()
    square = not name.startswith("mxfp8")
    w8, w8_t = along(w, gemm.weight, rule), along(w, gemm.weight, rule).t() if square else along(w.t(), gemm.weight, rule)
    wanted = {
        "output": (y, along(v, gemm.input, rule) @ w8.t()),
        "grad_input": (x.grad, along(g, gemm.grad_output, rule) @ w8_t.t()),
        "grad_weight": (low.weight.grad, along(g.t(), gemm.grad_output, rule) @ along(v.t(), gemm.input, rule).t()),
    }
    tolerance = 1e-6 if device.type == "cpu" else 2e-3
    for what, (got, want) in wanted.items():
        assert (got - want).norm() <= tolerance * want.norm(), what


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_weight_stored_in_fp8_is_taken_as_it_is(name):
    low = layer(recipe.O3.with_gemm(recipe.GEMMS[name]), (160, 48))
    gemm, weight = LayerGemm.of(low.scaling, low.weight), low.weight.detach()
    w, w_t = gemm.weight(weight.payload), gemm.weight(weight.payload, transpose=True)
    assert codes(w.payload).equal(codes(weight.payload))
    assert codes(w_t.payload).equal(codes(weight.payload).t())
    assert w.scale_inv.eq(weight.scale_inv).all()
    assert w.scale_inv.shape == w.granularity.scales_shape((48, 160))
    assert w_t.scale_inv.shape == w.granularity.scales_shape((160, 48))


@pytest.mark.parametrize("level", [recipe.O1, recipe.O2, recipe.O3], ids=lambda r: r.name)
@pytest.mark.parametrize("name", BLOCKWISE)
def test_blocks_do_not_travel_in_fp8_and_are_made_by_no_fused_kernel(level, name):
    blockwise = level.with_gemm(recipe.GEMMS[name])
    assert not blockwise.fp8_wire
    assert not blockwise.gemm.fusible
    assert level.gemm.fusible
    assert blockwise.shards_optimizer == level.shards_optimizer


def test_blocks_follow_a_channel_that_one_scale_drowns():
    x = make("log-normal", (128, 256))
    x[:, :128] *= 2.0**12
    quiet = slice(128, None)
    tensorwise, blocks = (layer(recipe.O2.with_gemm(recipe.GEMMS[name]), (256, 32)) for name in ("tensorwise", "blockwise"))
    want = x[:, quiet] @ tensorwise.weight.detach().dequantize()[:, quiet].t()
    errors = []
    for low in (tensorwise, blocks):
        operand = cast_operand(x, CastScales(None, None, None), low.scaling.gemm.input)
        values = dequantize_blocks(operand.payload, operand.scale_inv, operand.granularity)[:, quiet]
        errors.append(((values @ low.weight.detach().dequantize()[:, quiet].t()) - want).norm() / want.norm())
    assert errors[1] < errors[0] / 8


@pytest.mark.parametrize(
    ("gemm", "word"),
    [
        (Gemms.of(Cast(E4M3, object()), Cast(E4M3, Current()), Cast(E5M2)), "input has scaling rule"),
        (Gemms.of(Cast(E4M3), Cast(E4M3, Current()), Cast(E5M2, Current(), "rows")), "grad_output has granularity 'rows'"),
        (Gemms.of(Cast(E4M3, Delayed(), Group(8)), Cast(E4M3, Current()), Cast(E5M2)), r"input .* group\(8\); use Current\(\)"),
        (Gemms.of(Cast(E4M3), Cast(E4M3, Delayed()), Cast(E5M2)), r"weight has scaling delayed\(16\)"),
        (Gemms.of(Cast(BF16), Cast(E4M3, Current()), Cast(E5M2)), "input is cast to bf16"),
        (
            replace(recipe.O2.gemm, grad_weight=Product(Cast(E4M3), Cast(E4M3))),
            "grad_output is cast as fp8-e5m2 .* for one GEMM and as fp8-e4m3 .* for the other",
        ),
    ],
    ids=["rule", "granularity", "blocks with history", "weight with history", "format", "cast differently"],
)
def test_what_a_layer_cannot_cast_is_refused_where_it_is_built(gemm, word):
    with pytest.raises(ValueError, match=word):
        LinearScaling(gemm)


def test_built_in_casts_are_accepted():
    for gemm in GEMMS.values():
        check_gemm(gemm)
    gemm = recipe.O3.gemm
    assert wire_cast(E4M3, (gemm.input, gemm.grad_output)) == gemm.input


def test_partial_sums_need_the_format_of_an_operand():
    gemm = recipe.O3.gemm
    with pytest.raises(ValueError, match="partial sums cannot be sent in fp16"):
        wire_cast(FP16, (gemm.input, gemm.grad_output))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_smooth_swiglu_needs_one_delayed_scale_per_tensor(name):
    check_smooth(GEMMS["delayed"])
    with pytest.raises(ValueError, match="Smooth-SwiGLU requires operands with one delayed scale per tensor"):
        check_smooth(GEMMS[name])
