"""Attention with FP8 projections against torch's own, through every way to call it."""

import copy

import pytest
import torch
from torch import nn

from helpers.choices import each_value
from helpers.numerics import make
from msamp.nn.convert import convert
from msamp.nn.survey import survey
from msamp.numerics import recipe
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.tensor import ScalingTensor

SIZE, HEADS, BATCH, LONG, SHORT = 32, 4, 3, 7, 5


def pair(**options) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(SIZE, HEADS, **options)
    for bias in (plain.in_proj_bias, plain.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return plain, convert(copy.deepcopy(plain), recipe.O2)


CALLS = {
    "self": lambda t: {},
    "self without weights": lambda t: {"need_weights": False},
    "weights by head": lambda t: {"average_attn_weights": False},
    "bool masks": lambda t: {"attn_mask": torch.ones(t, t).triu(1).bool(), "key_padding_mask": torch.arange(t).expand(BATCH, t) > t - 3},
    "float mask": lambda t: {"attn_mask": make("normal", (t, t), seed=5), "need_weights": False},
    "mask by head": lambda t: {"attn_mask": make("normal", (BATCH * HEADS, t, t), seed=6)},
    "causal": lambda t: {"attn_mask": torch.ones(t, t).triu(1).bool(), "is_causal": True, "need_weights": False},
}


@pytest.mark.promise("Conversion", "`torch.nn.MultiheadAttention` becomes FP8 and computes what torch's does with every mask.")
@each_value(name=CALLS, batch_first=[True, False])
def test_self_attention_and_its_gradients_are_torch_s(name, batch_first):
    results = []
    for model in pair(batch_first=batch_first):
        x = make("normal", (BATCH, LONG, SIZE) if batch_first else (LONG, BATCH, SIZE)).requires_grad_()
        out, weights = model(x, x, x, **CALLS[name](LONG))
        out.backward(make("normal", out.shape, seed=1))
        results.append((out.detach(), weights, x.grad, model.in_proj_weight.grad, model.out_proj.weight.grad, model.in_proj_bias.grad))
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or (want.shape == got.shape and sqnr_db(want.detach(), got.detach()) > 15)


@pytest.mark.parametrize("same_value", [True, False])
def test_cross_attention_and_its_gradients_are_torch_s(same_value):
    results = []
    for model in pair(bias=False):
        q, k = make("normal", (SHORT, BATCH, SIZE)), make("normal", (LONG, BATCH, SIZE), seed=1)
        out, _ = model(q, k, k if same_value else make("normal", (LONG, BATCH, SIZE), seed=2))
        out.backward(make("normal", out.shape, seed=3))
        results.append((out.detach(), model.in_proj_weight.grad))
    for want, got in zip(*results, strict=True):
        assert sqnr_db(want, got) > 15


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kdim": 16}, "another width"),
        ({"add_bias_kv": True}, "add_bias_kv or add_zero_attn"),
        ({"add_zero_attn": True}, "add_bias_kv or add_zero_attn"),
    ],
)
def test_what_cannot_be_in_fp8_stays_whole_and_is_named(options, why):
    model = nn.Sequential(nn.MultiheadAttention(SIZE, HEADS, **options))
    assert why in survey(model).left["0"]
    assert type(convert(model, recipe.O2)[0]) is nn.MultiheadAttention
    assert not any(isinstance(p, ScalingTensor) for p in model.parameters())
