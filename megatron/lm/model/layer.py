"""One transformer layer: two fused functions with FP8 linear layers, else megatron-core's composition of the same modules."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional

from megatron.lm.model.attention import FP8CoreAttention, SDPAttention, cos_sin
from msamp.nn.attention_block import AttentionBlock, AttentionSettings
from msamp.nn.block import Norm
from msamp.nn.ends import ALONE, Ends
from msamp.nn.gemm import LayerGemm
from msamp.nn.mlp_block import MLPBlock, MLPSettings
from msamp.nn.saved_activations import AS_IT_IS, Saved


def activation_of(config: TransformerConfig) -> str:
    """Return the MLP's activation from megatron-core's configuration, as `gpt.transformer_config` sets it."""
    if config.gated_linear_unit:
        return "swiglu"
    return "squared-relu" if config.activation_func is functional.relu else "gelu"


class Layer(TransformerLayer):
    """megatron-core's TransformerLayer, with its parameters, computed by the fused blocks of `msamp.nn` where possible.

    `PrecisionConfig.fuses` defines for which models. The layer falls back to its modules while a linear layer has a forward hook, since a
    fused block never calls that layer, while `--fp8-guard` has raised one to BF16, and with arguments that only megatron-core's layer has.

    Attributes:
        fused: whether this layer uses the fused blocks.
        saved: how the blocks keep the inputs of norms and activation for backward.
    """

    def __init__(self, *args: Any, fused: bool = False, saved: Saved = AS_IT_IS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, self.fused, self.saved = self.config, fused, saved
        self.norm = Norm(config.layernorm_epsilon, config.normalization == "RMSNorm")
        self.activation = activation_of(config)
        selected = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_attention = "core_attn" in selected and not config.attention_dropout
        self.recompute_fc1 = "mlp" in selected

    def _linears(self) -> tuple[nn.Module, ...]:
        attention, mlp = self.self_attention, self.mlp
        return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2

    def _head_norms(self) -> tuple[nn.Module, ...]:
        """Return the norms of queries and keys, if the model has them."""
        attention = self.self_attention
        return (attention.q_layernorm, attention.k_layernorm) if self.config.qk_layernorm else ()

    @property
    def ends(self) -> Ends:
        """Return the communication at the ends of the blocks; none without tensor parallelism."""
        return self.self_attention.linear_qkv.converter or ALONE

    def weight_holders(self) -> Iterator[nn.Module]:
        """Iterate over the modules whose weights this layer's own forward uses, so they must be gathered before it."""
        if self.fused:
            yield from (self.input_layernorm, self.pre_mlp_layernorm, *self._head_norms(), *self._linears())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, h] -> (the same after this layer, None); the other arguments are TransformerLayer's, the mask as
        `SDPAttention.forward` takes it."""
        apart = self.fused and any(m._forward_hooks or m.scaling.raised for m in self._linears())  # type: ignore[union-attr]
        if not self.fused or apart or any(value is not None for value in (*args, *kwargs.values())):
            return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        x, delta = self._attention(hidden_states.contiguous(), attention_mask, rotary_pos_emb)
        norm, fc1, fc2 = self.pre_mlp_layernorm, self.mlp.linear_fc1, self.mlp.linear_fc2
        gemms = LayerGemm.of(fc1.scaling, fc1.weight), LayerGemm.of(fc2.scaling, fc2.weight)
        settings = MLPSettings(self.norm, *gemms, self.activation, self.recompute_fc1, self.saved, self.ends)
        norm_bias = getattr(norm, "bias", None)
        return MLPBlock.apply(x, delta, norm.weight, norm_bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, settings), None

    def _attention(self, x: Tensor, mask: Tensor | None, rotary_pos_emb: Tensor | None) -> tuple[Tensor, Tensor]:
        attention, norm = self.self_attention, self.input_layernorm
        qkv, proj, core = attention.linear_qkv, attention.linear_proj, attention.core_attention
        rows = x.shape[0] * (self.tp_group.size() if self.ends.spread else 1)
        fp8 = core.now() if isinstance(core, FP8CoreAttention) and mask is None else None
        exchange = core.exchange(rows, mask) if fp8 is None and isinstance(core, SDPAttention) else None
        cos, sin = (x.new_empty(rows, 0, dtype=torch.float32),) * 2 if rotary_pos_emb is None else cos_sin(rotary_pos_emb)
        settings = AttentionSettings(
            norm=self.norm,
            qkv=LayerGemm.of(qkv.scaling, qkv.weight),
            proj=LayerGemm.of(proj.scaling, proj.weight),
            core=functools.partial(core, attention_mask=mask) if exchange is None else exchange.attention,
            heads=attention.num_attention_heads_per_partition,
            groups=attention.num_query_groups_per_partition,
            cos=cos,
            sin=sin,
            keep=torch.is_grad_enabled(),
            recompute=self.recompute_attention,
            saved=self.saved,
            ends=self.ends,
            fp8=fp8,
            sharing=exchange,
        )
        norm_bias = getattr(norm, "bias", None)
        heads = [parameter for one in self._head_norms() for parameter in (one.weight, getattr(one, "bias", None))]
        return AttentionBlock.apply(x, norm.weight, norm_bias, qkv.weight, qkv.bias, proj.weight, proj.bias, settings, *heads)
