"""Small halves of a transformer layer for the block tests: weights, settings, and the same function out of torch's own operations."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msamp.nn.attention_block import AttentionSettings, split_heads
from msamp.nn.block import Norm
from msamp.nn.fp8_attention import AttentionScaling, FP8Attention
from msamp.nn.gemm import LayerGemm
from msamp.nn.mlp_block import MLPSettings
from msamp.nn.scaling_state import GRAD_OUTPUT, INPUT, LinearScaling
from msamp.numerics.quantize import quantize
from msamp.numerics.recipe import Recipe
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor

S, B, H, HEADS, D = 32, 2, 64, 4, 16
EPS = 1e-5


class Half:
    """Parameters of one half by name, as leaves, and its linear layers' scales."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], recipe: Recipe, device: torch.device | str, bias: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.recipe = recipe
        self.tensors: dict[str, Any] = {}
        self.scaling: dict[str, LinearScaling] = {}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
            if len(shape) == 2:
                values = values / math.sqrt(shape[1])
                self.tensors[name] = torch.nn.Parameter(ScalingTensor.quantize(values, recipe.weight))
                self.scaling[name] = LinearScaling(recipe.gemm, device=device)
                extra, value = f"{name}_bias", values[:, 0] / 4
            else:
                self.tensors[name] = torch.nn.Parameter(1 + values / 8)
                extra, value = f"{name}_bias", values / 4
            self.tensors[extra] = torch.nn.Parameter(value.clone()) if bias else None

    def gemm(self, name: str) -> LayerGemm:
        return LayerGemm.of(self.scaling[name], self.tensors[name])

    def arguments(self) -> list[Any]:
        return list(self.tensors.values())

    def plain(self) -> dict[str, Tensor | None]:
        """The same parameters as FP64 leaves: what the FP8 weights stand for."""
        values = {k: None if t is None else t.detach() for k, t in self.tensors.items()}
        wide = {k: v.dequantize(torch.float32) if isinstance(v, ScalingTensor) else v for k, v in values.items()}
        return {k: None if v is None else v.double().requires_grad_() for k, v in wide.items()}


def attention_half(recipe: Recipe, device: torch.device | str = "cpu", groups: int = HEADS, bias: bool = True) -> Half:
    shapes = {"norm": (H,), "qkv": ((HEADS + 2 * groups) * D, H), "proj": (H, HEADS * D)}
    return Half(shapes, recipe, device, bias)


def mlp_half(recipe: Recipe, device: torch.device | str = "cpu", activation: str = "gelu", bias: bool = True) -> Half:
    width = 2 * H
    shapes = {"norm": (H,), "fc1": (width * (2 if activation == "swiglu" else 1), H), "fc2": (H, width)}
    return Half(shapes, recipe, device, bias)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if not q.is_cuda:
        q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1).to(query.dtype)


def angles(device: torch.device | str, rotated: int = D) -> Tensor:
    steps = torch.arange(S)[:, None] / 100.0 ** (torch.arange(0, rotated, 2) / max(rotated, 1))
    return torch.cat((steps, steps), -1).to(device)


def attention_settings(half: Half, groups: int = HEADS, rms: bool = False, keep: bool = True, **changes: Any) -> AttentionSettings:
    theta = angles(half.tensors["norm"].device)
    settings = AttentionSettings(
        Norm(EPS, rms), half.gemm("qkv"), half.gemm("proj"), attend, HEADS, groups, theta.cos(), theta.sin(), keep, recompute=False
    )
    return settings._replace(**changes)


def fp8_attention(half: Half, record: bool = True) -> FP8Attention:
    """FP8 attention of the half, with new scales."""
    return FP8Attention(AttentionScaling(half.recipe.gemm, half.tensors["norm"].device), 1 / math.sqrt(D), True, record)


def mlp_settings(half: Half, activation: str = "gelu", rms: bool = False, **changes: Any) -> MLPSettings:
    return MLPSettings(Norm(EPS, rms), half.gemm("fc1"), half.gemm("fc2"), activation, recompute=False)._replace(**changes)


def plain_norm(x: Tensor, p: dict[str, Tensor | None], rms: bool) -> Tensor:
    if rms:
        return functional.rms_norm(x, (H,), p["norm"], EPS)
    return functional.layer_norm(x, (H,), p["norm"], p["norm_bias"], EPS)


def plain_attention(x: Tensor, p: dict[str, Tensor | None], groups: int, rms: bool) -> Tensor:
    """What attention adds to x, in the precision of x."""
    qkv = functional.linear(plain_norm(x, p, rms), p["qkv"], p["qkv_bias"])
    query, key, value = split_heads(qkv, HEADS, groups)
    theta = angles(x.device).double()[:, None, None]

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return t * theta.cos() + torch.cat((-second, first), -1) * theta.sin()

    return functional.linear(attend(rotate(query), rotate(key), value), p["proj"], p["proj_bias"])


def plain_mlp(x: Tensor, p: dict[str, Tensor | None], activation: str, rms: bool) -> Tensor:
    """x + MLP(norm(x)), in the precision of x."""
    y = functional.linear(plain_norm(x, p, rms), p["fc1"], p["fc1_bias"])
    if activation == "swiglu":
        gate, up = y.chunk(2, -1)
        a = functional.silu(gate) * up
    elif activation == "squared-relu":
        a = functional.relu(y).square()
    else:
        a = functional.gelu(y, approximate="tanh")
    return x + functional.linear(a, p["fc2"], p["fc2_bias"])


def watch_casts(half: Half) -> dict[tuple[str, int], tuple[Tensor, ...]]:
    """Fills up, from now on, with what the watches of each layer's casts are told, by layer and row."""
    told: dict[tuple[str, int], tuple[Tensor, ...]] = {}
    for name, scaling in half.scaling.items():
        for row in (INPUT, GRAD_OUTPUT):
            scaling.watches[row] = lambda *found, key=(name, row): told.__setitem__(key, tuple(x.clone() for x in found))
    return told


def check_casts(half: Half, told: dict[tuple[str, int], tuple[Tensor, ...]]) -> None:
    """Every operand was told, and its values, cast with its scale, are its payload (on a GPU the compiler may fuse each kernel's
    multiplications and additions in its own way, which moves a code here and there)."""
    assert told.keys() == {(name, row) for name in half.scaling for row in (INPUT, GRAD_OUTPUT)}
    for (name, row), (values, payload, scale_inv) in told.items():
        fmt = half.scaling[name].formats[row]
        made = quantize(values.reshape(payload.shape), inverse(scale_inv), fmt)
        others = (made.view(torch.uint8) != payload.view(torch.uint8)).float().mean()
        assert others <= (1e-3 if payload.is_cuda else 0.0), (name, row)
        torch.testing.assert_close(half.scaling[name].amax[row], values.float().abs().amax(), rtol=1e-6, atol=0)
