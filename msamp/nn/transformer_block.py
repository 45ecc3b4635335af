"""A transformer block for your own model that runs fused once its linear layers are FP8.

As built it is plain torch: norms, `torch.nn.Linear`, `scaled_dot_product_attention`. `msamp.initialize`, `msamp.convert` and
`msamp.integrations.fsdp.prepare` convert its four linear layers like any others, in place. From then on the block runs as the trainer's
layers do, as two autograd functions (`msamp.nn.attention_block`, `msamp.nn.mlp_block`): each norm, activation and cast writes the FP8
operand of the next GEMM, so a block has fewer launches and saves less for backward. It reads weights as they are stored, also those that
FSDP2 gathers at one byte per element.

Layout and order of weights are Megatron's: activations [sequence, batch, hidden]; QKV has for each group its queries, key and value; for
SwiGLU the gate comes before the other half in `fc1`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from msamp.kernels.reference.activate import KINDS
from msamp.nn.attention_block import AttentionBlock, AttentionSettings, split_heads
from msamp.nn.block import Norm, hooks_of, wait_for_weights
from msamp.nn.gemm import LayerGemm
from msamp.nn.linear import FP8Linear
from msamp.nn.mlp_block import MLPBlock, MLPSettings
from msamp.nn.saved_activations import AS_IT_IS, Saved
from msamp.nn.unfused import RotaryFunction
from msamp.numerics.tensor import ScalingTensor


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input.

    It runs fused while its four linear layers are FP8Linear with one scale per tensor, none of them has a hook or is raised to BF16, and
    autocast is off; otherwise as plain torch. `fused` reports which.

    Args:
        hidden: width of the residual stream.
        heads: of the queries; divides `hidden`.
        ffn: width of the MLP's activation.
        groups: number of heads of keys and values, which divides `heads`; None is `heads`.
        activation: "swiglu", "gelu" (tanh form) or "squared-relu".
        rms: RMSNorm instead of LayerNorm.
        eps: of the norms.
        bias: of the linear layers.
        saved: how the inputs of norms and activation are saved for backward while it runs fused; unchanged by default, in COAT's FP8 groups
            with `msamp.nn.saved_activations.IN_GROUPS`.
        settings: device and dtype.

    Shape: x [s, b, hidden], and for rotary embedding FP32 cos and sin [s, r] of the first r channels of a head -> [s, b, hidden].

    Raises:
        ValueError: if `heads` does not divide `hidden`, `groups` does not divide `heads`, or the activation is unknown.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        groups: int | None = None,
        activation: str = "swiglu",
        rms: bool = True,
        eps: float = 1e-5,
        bias: bool = False,
        saved: Saved = AS_IT_IS,
        **settings: Any,
    ) -> None:
        super().__init__()
        groups = heads if groups is None else groups
        if hidden % heads or heads % groups:
            raise ValueError(f"hidden is {hidden}, heads {heads}, groups {groups}; heads must divide hidden, and groups must divide heads")
        if activation not in KINDS:
            raise ValueError(f"activation is {activation!r}; choose one of {', '.join(KINDS)}")
        self.heads, self.groups, self.activation, self.settings, self.saved = heads, groups, activation, Norm(eps, rms), saved
        self.norm_1, self.norm_2 = (
            nn.RMSNorm(hidden, eps=eps, **settings) if rms else nn.LayerNorm(hidden, eps=eps, **settings) for _ in range(2)
        )
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * (hidden // heads), bias, **settings)
        self.proj = nn.Linear(hidden, hidden, bias, **settings)
        self.fc1 = nn.Linear(hidden, ffn * (2 if activation == "swiglu" else 1), bias, **settings)
        self.fc2 = nn.Linear(ffn, hidden, bias, **settings)

    @property
    def fused(self) -> bool:
        """Whether the next forward runs as two fused functions."""
        return not torch.is_autocast_enabled(self.norm_1.weight.device.type) and all(map(_fusable, self._linears()))

    def _linears(self) -> tuple[nn.Module, ...]:
        return self.qkv, self.proj, self.fc1, self.fc2

    def weight_holders(self) -> tuple[nn.Module, ...]:
        """Return the modules whose weights this block's own forward uses (`ZeRO.watch_forward`)."""
        return (self,)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None) -> torch.Tensor:
        if cos is None or sin is None:
            cos = sin = x.new_empty(x.shape[0], 0, dtype=torch.float32)
        if self.fused:
            wait_for_weights(self)
            return self._fused(x.contiguous(), cos, sin)
        qkv = self.qkv(self.norm_1(x))
        parts = RotaryFunction.apply(qkv, cos, sin, self.heads, self.groups) if cos.shape[1] else split_heads(qkv, self.heads, self.groups)
        x = x + self.proj(attend(*parts))
        y = self.fc1(self.norm_2(x))
        if self.activation == "swiglu":
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y, approximate="tanh") if self.activation == "gelu" else functional.relu(y).square()
        return x + self.fc2(y)

    @torch._disable_dynamo  # torch.compile calls the block as a whole: its kernels are fused already
    def _fused(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv, proj, fc1, fc2 = (LayerGemm.of(layer.scaling, layer.weight) for layer in self._linears())  # type: ignore[arg-type]
        attention = AttentionSettings(
            self.settings,
            qkv,
            proj,
            attend,
            self.heads,
            self.groups,
            cos,
            sin,
            keep=torch.is_grad_enabled(),
            saved=self.saved,
            recompute=False,
        )
        norm = self.norm_1
        x, delta = AttentionBlock.apply(
            x, norm.weight, _bias(norm), self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias, attention
        )
        norm, mlp = self.norm_2, MLPSettings(self.settings, fc1, fc2, self.activation, saved=self.saved, recompute=False)
        return MLPBlock.apply(x, delta, norm.weight, _bias(norm), self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, mlp)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, {self.activation}, fused={self.fused}"


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return o.permute(2, 0, 1, 3).flatten(2)


def _bias(norm: nn.Module) -> torch.Tensor | None:
    return getattr(norm, "bias", None)


def _fusable(layer: nn.Module) -> bool:
    """Whether a fused block can use a linear layer's weight, which then never calls the layer itself."""
    return (
        isinstance(layer, FP8Linear)
        and isinstance(getattr(layer.weight, "_local_tensor", layer.weight), ScalingTensor)  # between gathers, FSDP2's is a DTensor
        and layer.scaling.gemm.tensorwise
        and not layer.scaling.raised
        and not layer.scaling.in_bf16
        and not hooks_of(layer)
    )
