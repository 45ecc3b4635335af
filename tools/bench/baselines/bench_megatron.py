"""Measure training steps of a GPT in megatron-core with Transformer Engine's layers, in BF16 and FP8, eager and captured.

    python tools/bench/bench_step.py --levels O0 O3 --peer 'python tools/bench/baselines/bench_megatron.py'
    python tools/bench/baselines/bench_megatron.py --cases bf16 te-delayed --builds captured --preset 125m --micro-batch-size 8

It requires Transformer Engine (pip install -e '.[peers]', with a CUDA compiler and cuDNN's headers); the measurements are of megatron-core
0.16.1 and Transformer Engine 2.11. A step is megatron-core's own: BF16 weights, DDP with FP32 gradients, and the distributed optimizer with
fused Adam on FP32 masters and clipping to a norm of 1. Rotary embeddings, bias with GELU, bias with the residual sum, and the cross-entropy
are fused; there is no dropout. Tokens are random. One JSON object per line is printed for each case and build:

    bf16             Transformer Engine's layers in BF16
    te-delayed       its FP8, E4M3 forward and E5M2 backward, scaled by the largest amax of 1,024 steps
    te-tensorwise    the same formats, scaled by the amax of the present tensor

    eager            no graph
    captured         forward and backward in megatron-core's full-iteration CUDA graph; clipping and update follow outside of it

`peak_gib` counts from the end of the warm-up. The memory in which a graph replays forward and backward, activations included, is not
allocated anew then, so that a captured row's peak leaves it out: compare memory by eager rows. A case that fails prints its error, under
which `bench_step.py --peer` records it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron.lm.config.presets import PRESETS
from megatron.lm.config.sections.baselines import INSTALL, installed
from megatron.lm.shell import exit_codes
from tools.bench import training_steps
from tools.bench.bench_kernels import BF16
from tools.bench.training_steps import Row

CASES = {"bf16": None, "te-delayed": "delayed", "te-tensorwise": "tensorwise"}
BUILDS = ("eager", "captured")
WARM_UP = 8


def training_step(recipe: str | None, captured: bool, shape: Row, vocab_size: int, batch: int) -> tuple[Callable[[], Any], int]:
    """Return a step of training, which returns megatron-core's list of losses, and the number of parameters."""
    size, fused = shape["seq_length"], ("gradient_accumulation", "bias_dropout", "apply_rope", "bias_activation", "cross_entropy_loss")
    more: Row = {f"{name}_fusion": True for name in fused} | {"attention_dropout": 0.0, "hidden_dropout": 0.0, "pipeline_dtype": BF16}
    more |= {name: shape[name] for name in ("num_layers", "hidden_size", "num_attention_heads")}
    if recipe:
        window, algorithm = (1024, "max") if recipe == "delayed" else (1, "most_recent")
        more |= {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_amax_history_len": window, "fp8_amax_compute_algo": algorithm}
    if captured:
        more |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
    types: Row = {"bf16": True, "params_dtype": BF16}
    config = TransformerConfig(ffn_hidden_size=4 * shape["hidden_size"], masked_softmax_fusion=False, **more, **types)
    rates = {"lr": 3e-4, "min_lr": 3e-5, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0}
    settings = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, fp8_recipe=recipe, **rates, **types)
    tensor_parallel.model_parallel_cuda_manual_seed(123, te_rng_tracker=captured, force_reset_rng=True)
    spec, tied = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(), {"share_embeddings_and_output_weights": True}
    model: Any = GPTModel(config, spec, vocab_size, size, position_embedding_type="rope", **tied).cuda()
    params = sum(parameter.numel() for parameter in model.parameters())
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model))
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    run = get_forward_backward_func()
    if captured:
        # Its graph belongs to the class, and so would be the one of the case before.
        FullCudaGraphWrapper.cuda_graph, FullCudaGraphWrapper.curr_iteration = {"training": None}, {"training": 0}
        run = FullCudaGraphWrapper(run, cuda_graph_warmup_steps=3)
    tokens = torch.randint(0, vocab_size, (batch, size + 1), device="cuda")
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(size, device="cuda")[None].expand(batch, -1).contiguous()

    def loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    def forward(_: Any, gpt: Any) -> tuple[Tensor, Any]:
        return gpt(inputs, positions, None, labels=labels), loss

    arguments = {"num_microbatches": 1, "seq_length": size, "micro_batch_size": batch, "forward_only": False}

    def step() -> Any:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(forward_step_func=forward, data_iterator=None, model=[model], **arguments)
        optimizer.step()
        return losses

    return step, params


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a row for each build of each case."""
    gpts = (name for name, shape in PRESETS.items() if "swiglu" not in shape)
    parser = training_steps.baseline_parser(__doc__, CASES, CASES, BUILDS, gpts)
    options = parser.parse_args(argv)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as megatron-core's launch scripts; before CUDA starts
    if not torch.cuda.is_available():
        parser.error("no GPU is available; training steps are measured on a GPU")
    if not installed():
        raise ValueError(f"this baseline requires Transformer Engine, which is not installed: {INSTALL}")
    if not layers._grad_accum_fusion_available:
        # Transformer Engine's layers add weight gradients to the FP32 ones in their GEMM. For the LM head, its own layer, megatron-core
        # requires Apex's extension for that, which is no package to install: torch computes the same sum, in a GEMM and an addition.
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda x, grad, total: total.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
        )
        layers._grad_accum_fusion_available = True
    shape, vocab_size = training_steps.baseline_shape(options)
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()

    def measurements(name: str) -> Iterator[Row]:
        case, _, captured = name.partition(" ")
        step, params = training_step(CASES[case], bool(captured), shape, vocab_size, options.micro_batch_size)
        training_steps.synchronized_step_times(step, WARM_UP)
        torch.cuda.reset_peak_memory_stats()
        times, losses = training_steps.synchronized_step_times(step, options.steps)
        columns = training_steps.time_columns(times, options.micro_batch_size * shape["seq_length"])
        loss = round(float(losses[0]["loss"]), 4)
        yield {"case": name, "params_m": round(params / 1e6, 1)} | columns | training_steps.memory() | {"loss": loss}

    names = [case + " captured" * (how == "captured") for how in options.builds for case in options.cases]
    return training_steps.print_rows(names, measurements)


if __name__ == "__main__":
    sys.exit(main())
