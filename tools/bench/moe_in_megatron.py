"""OLMoE's shape in plain megatron-core, without Transformer Engine: the case `megatron` of `bench_moe_baselines`.

megatron-core 0.16.1 multiplies experts in one kernel only with Transformer Engine or the package grouped_gemm. Without them it runs one MLP
after another (`SequentialMLP`), and copies the number of tokens per expert to the host. Its attention would store the scores of all pairs
of tokens; `SDPAttention`, which our layers use too, takes that slot. Its router calls a function of Transformer Engine, which
`PlainRouter` does not. Nothing of megatron-core is changed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.lm.model.attention import SDPAttention
from megatron.lm.processes.cpu_home import cpu_home


class PlainRouter(TopKRouter):
    """megatron-core's router with FP32 logits by torch."""

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Process groups of this one process, and seeds, as megatron-core's modules require."""
    with cpu_home():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(0)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class MegatronTrainer:
    """A model of transformers' `OlmoeConfig`, megatron-core's DDP with FP32 gradients, and its optimizer with FP32 masters.

    Use it within `started`. The norms of queries and keys, which megatron-core has per head only, are left out, as are the router's losses.
    """

    def __init__(self, config: Any, device: torch.device, lr: float = 1e-5) -> None:
        compiles = device.type == "cuda"  # the fusions without Transformer Engine are torch.compile's
        shape = TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            ffn_hidden_size=config.intermediate_size,
            moe_ffn_hidden_size=config.intermediate_size,
            num_moe_experts=config.num_experts,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_pre_softmax=True,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=device.type == "cpu",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            bias_activation_fusion=compiles,
            cross_entropy_loss_fusion=compiles,
        )
        spec = get_gpt_layer_local_spec(num_experts=config.num_experts, moe_grouped_gemm=False, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = SDPAttention
        spec.submodules.mlp.submodules.router = PlainRouter
        model = GPTModel(
            shape,
            spec,
            config.vocab_size,
            config.max_position_embeddings,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        model = Float16Module(shape, model.to(device))
        self.model = DistributedDataParallel(shape, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        settings = OptimizerConfig(
            optimizer="adam", lr=lr, min_lr=lr, weight_decay=0.1, adam_beta2=0.95, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        for group in self.optimizer.param_groups:  # torch's default makes temporaries as large as the masters
            group["fused"] = compiles

    def step(self, batches: Sequence[Tensor]) -> Tensor:
        """Train on some micro-batches, and return their mean loss."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = []
        for tokens in batches:
            positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
            loss = self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).float().mean() / len(batches)
            loss.backward()
            losses.append(loss.detach())
        self.model.finish_grad_sync()
        self.optimizer.step()
        return torch.stack(losses).sum()
