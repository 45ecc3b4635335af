"""The ends of a block: a group of one rank that gathers and adds up changes no bit, whatever it keeps."""

from typing import Any

import pytest
import torch

from helpers.block_halves import B, H, S, attention_half, attention_settings, mlp_half, mlp_settings
from helpers.choices import each_value
from helpers.numerics import make
from msamp.nn.attention_block import AttentionBlock
from msamp.nn.ends import ALONE, PendingRows
from msamp.nn.gemm import LayerGemm, RowProduct
from msamp.nn.linear_fn import LinearFunction, LinearSettings
from msamp.nn.mlp_block import MLPBlock
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.recipe import O3


class Window:
    """Gathered rows in memory that the next collective writes: once given back they are NaN."""

    def __init__(self, payload: torch.Tensor) -> None:
        self.rows, self.kept, self.given_back = payload.clone(), False, 0

    def __call__(self) -> torch.Tensor:
        assert not self.given_back
        return self.rows

    def product(self, product: RowProduct) -> torch.Tensor:
        return product.of(self())

    def keep(self) -> torch.Tensor:
        self.kept = True
        return self.rows.clone()

    def done(self) -> None:
        self.given_back += 1
        self.rows.view(torch.uint8).fill_(0x7F)


class OneRank:
    """A tensor-parallel group of one rank, under sequence parallelism, which notes what it is asked for."""

    ranks, spread = 1, True

    def __init__(self, keeps_gathered: bool, adds_bias: bool = True) -> None:
        self.keeps_gathered, self.adds_bias = keeps_gathered, adds_bias
        self.asked: list[str] = []
        self.out: list[Window] = []

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        self.asked.append("amax")
        return amax.clone()

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        self.asked.append(label)
        rows = Window(payload)
        self.out.append(rows)
        return rows

    def sum_output(self, product: RowProduct, codes: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        self.asked.append("output")
        return product.of(codes)

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Any:
        self.asked.append("grad_input")
        return partial.clone


def found(block: str, delayed: bool, ends: Any, recompute: bool) -> list[torch.Tensor]:
    """What a half gives, its gradients, and the amaxes that it records."""
    half = (attention_half if block == "attention" else mlp_half)(O3)
    for scaling in half.scaling.values():
        scaling.scale.fill_(8.0)
        scaling.scale_inv.fill_(1 / 8)
        scaling._count(scaling.window if delayed else 0)
    x, delta, grad = (make("normal", (S, B, H), seed=seed).to(torch.bfloat16) for seed in (1, 2, 3))
    leaves = [x.requires_grad_()]
    if block == "attention":
        _, out = AttentionBlock.apply(x, *half.arguments(), attention_settings(half, recompute=recompute, ends=ends))
    else:
        leaves.append(delta.requires_grad_())
        out = MLPBlock.apply(x, delta, *half.arguments(), mlp_settings(half, recompute=recompute, ends=ends))
    leaves += [t for t in half.arguments() if t is not None]
    gradients = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *gradients, *(scaling.amax for scaling in half.scaling.values())]


@each_value(keeps_gathered=[False, True], recompute=[False, True], delayed=[False, True], block=["attention", "MLP"])
def test_one_rank_is_a_block_alone(block, delayed, recompute, keeps_gathered):
    ends = OneRank(keeps_gathered)
    for got, want in zip(found(block, delayed, ends, recompute), found(block, delayed, ALONE, recompute), strict=True):
        assert torch.equal(got, want)
    again = [] if keeps_gathered else ["input all-gather again"]
    gathers = ["input all-gather", "output", "grad_output all-gather", *again, "grad_input"]
    assert [what for what in ends.asked if what != "amax"] == gathers
    assert ends.asked.count("amax") == (0 if delayed else 2)  # the norm's output and the grad_output
    assert all(rows.given_back == 1 for rows in ends.out)


@pytest.mark.parametrize("keeps_gathered", [False, True], ids=["shard", "gathered"])
@pytest.mark.parametrize("end", ["input", "output"])
def test_a_linear_layer_of_one_rank_gives_back_what_it_gathers(end, keeps_gathered):
    half, ends = mlp_half(O3), OneRank(keeps_gathered)
    weight, bias = half.tensors["fc1"], half.tensors["fc1_bias"]
    x, grad = (make("normal", (S, B, n), seed=seed).to(torch.bfloat16) for seed, n in ((1, H), (2, weight.shape[0])))

    def run(**how: Any) -> list[torch.Tensor]:
        scaling = LinearScaling(O3.gemm)
        leaf = x.clone().requires_grad_()
        y = LinearFunction.apply(leaf, weight, bias, LinearSettings(LayerGemm.of(scaling, weight), **how))
        return [y.detach(), *torch.autograd.grad(y, (leaf, weight, bias), grad)]

    for got, want in zip(run(**{f"{end}_end": ends}), run(), strict=True):
        assert got.equal(want)
    assert ends.out
    assert all(rows.given_back == 1 for rows in ends.out)
