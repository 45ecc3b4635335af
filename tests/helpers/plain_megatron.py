"""A program of plain megatron-core, without this repository: it writes checkpoints as Megatron-LM does, and loads them.

    python plain_megatron.py write FOLDER '{"a": {"tp": 2, "swiglu": true}}'    # forks into WORLD_SIZE ranks once all is imported
    python plain_megatron.py load FOLDER '{"a": {...}}'

`write` trains a small GPT for three steps of random gradients, saves it under FOLDER/a/iter_0000010 with megatron-core's own
`dist_checkpointing`, and stores in FOLDER/a/write_RANK.pt what its parameters, optimizer states and FP32 logits are. `load` loads
FOLDER/a/iter_0000010 and stores the same in load_RANK.pt. A case names settings that differ from `DEFAULTS`.
megatron-core names CUDA in many places; a few functions of torch are replaced
where there is none.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

DEFAULTS: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "groups": None,
    "ffn": 64,
    "swiglu": False,
    "rms": False,
    "bias": True,
    "tied": True,
    "vocabulary": 64,
    "sequence": 16,
    "positions": "rope",
    "dtype": "float32",
    "optimizer": "distributed",
    "steps": 3,
    "sharding": "fully_reshardable",
    "qk_norm": False,
    "qkv_bias": False,
    "squared_relu": False,
    "rope_scaling": False,
    "interpolation": None,
    "lr": 1e-2,
    "min_lr": None,
    "seed": 7,
    "metadata": {},
    "iteration": 10,
    "spec": "local",
    "fp8": None,
    "hybrid": None,
}


def pretend_cuda() -> None:
    """Answer megatron-core's calls for CUDA with the CPU, in this process alone."""
    import megatron.core.tensor_parallel.random as megatron_random

    def on_cpu(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return call

    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.type = lambda self, *a: x.replace("torch.", "torch.cuda.", 1) if isinstance(x := kind(self, *a), str) else x
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    # megatron-core 0.19 waits for streams wherever it runs.
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: Mock()
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.get_rng_state = megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed


def hybrid(config: Any, pattern: str, **shared: Any) -> Any:
    """HybridModel (megatron-core 0.18 and later) of local layers; its own spec and its last norm ask for Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = WrappedTorchNorm
    whole = get_gpt_layer_local_spec(normalization=config.normalization).submodules
    parts = {"attention": ("input_layernorm", "self_attention", "self_attn_bda"), "mlp": ("pre_mlp_layernorm", "mlp", "mlp_bda")}
    layers = {name: TransformerLayerSubmodules(**{part: getattr(whole, part) for part in of}) for name, of in parts.items()}
    submodules = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=layers["attention"]),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=layers["mlp"]),
    )
    spec = ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules)
    return HybridModel(config=config, hybrid_stack_spec=spec, hybrid_layer_pattern=pattern, **shared)


def build(s: dict[str, Any]) -> Any:
    """GPTModel of the local spec, with dense attention in plain torch, or HybridModel."""
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn import functional

    plain = squared_relu if s["squared_relu"] else lambda x: functional.gelu(x, approximate="tanh")
    config = TransformerConfig(
        num_layers=s["layers"],
        hidden_size=s["hidden"],
        num_attention_heads=s["heads"],
        num_query_groups=s["groups"] or s["heads"],
        ffn_hidden_size=s["ffn"],
        normalization="RMSNorm" if s["rms"] else "LayerNorm",
        gated_linear_unit=s["swiglu"],
        activation_func=functional.silu if s["swiglu"] else plain,
        add_bias_linear=s["bias"],
        add_qkv_bias=s["qkv_bias"],
        qk_layernorm=s["qk_norm"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=s["tp"],
        pipeline_model_parallel_size=s["pp"],
        params_dtype=getattr(torch, s["dtype"]),
        pipeline_dtype=getattr(torch, s["dtype"]),
        bf16=s["dtype"] == "bfloat16",
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **({"fp8": s["fp8"], "fp8_recipe": "delayed", "fp8_amax_history_len": 16} if s["fp8"] else {}),
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=s["qk_norm"])
    if s["spec"] == "te":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=s["qk_norm"])
    shared = {
        "config": config,
        "vocab_size": s["vocabulary"],
        "max_sequence_length": s["sequence"],
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": s["tied"],
        "position_embedding_type": s["positions"],
        "seq_len_interpolation_factor": s["interpolation"],
    }
    if s["hybrid"]:
        return hybrid(pattern=s["hybrid"], **shared)
    return GPTModel(transformer_layer_spec=spec, rope_scaling=s["rope_scaling"], rope_scaling_factor=8.0, **shared)


def optimizer_of(model: Any, s: dict[str, Any]) -> tuple[Any, Any]:
    """megatron-core's DDP around the model, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = s["optimizer"] == "distributed"
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, bucket_size=None),
        model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=s["lr"],
        min_lr=s["min_lr"],
        weight_decay=0.1,
        bf16=s["dtype"] == "bfloat16",
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
    )
    return ddp, get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=True)


def train(ddp: Any, optimizer: Any, s: dict[str, Any]) -> None:
    """A few steps of random gradients, so that masters and moments are not those of the start."""
    same, own = torch.Generator().manual_seed(s["seed"]), torch.Generator().manual_seed(s["seed"] + 1 + dist.get_rank())
    for _ in range(s["steps"]):
        for p in ddp.parameters():
            # Ranks that hold a copy of a parameter get the same gradient, as the backward pass would give them.
            draw = own if getattr(p, "tensor_model_parallel", False) else same
            p.main_grad.copy_(torch.randn(p.shape, generator=draw) * 0.1)
        ddp.start_grad_sync()
        ddp.finish_grad_sync()
        optimizer.step()


def logits_of(model: Any, s: dict[str, Any]) -> torch.Tensor | None:
    """FP32 logits [b, s, V] of fixed tokens; None on more than one pipeline stage."""
    if s["pp"] > 1:
        return None
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.randint(0, s["vocabulary"] - 4, (2, s["sequence"]), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(s["sequence"]).repeat(2, 1)
    mask = torch.ones(s["sequence"], s["sequence"], dtype=torch.bool).triu(1)[None, None]
    tokens, positions, mask = (x.to(next(model.parameters()).device) for x in (tokens, positions, mask))
    with torch.no_grad():
        return gather_from_tensor_model_parallel_region(model(tokens, positions, mask).float()).cpu()


def arguments(s: dict[str, Any]) -> argparse.Namespace:
    """`args`, as Megatron-LM stores it."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        num_layers=s["layers"],
        hidden_size=s["hidden"],
        ffn_hidden_size=s["ffn"],
        num_attention_heads=s["heads"],
        group_query_attention=s["groups"] is not None,
        num_query_groups=s["groups"] or 1,
        kv_channels=s["hidden"] // s["heads"],
        seq_length=s["sequence"],
        max_position_embeddings=s["sequence"],
        normalization="RMSNorm" if s["rms"] else "LayerNorm",
        norm_epsilon=1e-5,
        swiglu=s["swiglu"],
        add_bias_linear=s["bias"],
        add_qkv_bias=s["qkv_bias"],
        squared_relu=s["squared_relu"],
        use_rope_scaling=s["rope_scaling"],
        rope_scaling_factor=8.0,
        rotary_seq_len_interpolation_factor=s["interpolation"],
        qk_layernorm=s["qk_norm"],
        position_embedding_type=s["positions"],
        add_position_embedding=s["positions"] == "learned_absolute",
        rotary_base=10000,
        rotary_percent=1.0,
        untie_embeddings_and_output_weights=not s["tied"],
        padded_vocab_size=s["vocabulary"],
        make_vocab_size_divisible_by=s["vocabulary"] // s["tp"],
        tokenizer_type="NullTokenizer",
        tensor_model_parallel_size=s["tp"],
        pipeline_model_parallel_size=s["pp"],
        params_dtype=getattr(torch, s["dtype"]),
        attention_backend=AttnBackend.auto,
        global_batch_size=4,
        consumed_train_samples=40,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_experts=None,
        hybrid_layer_pattern=s["hybrid"],
    )


def metadata(s: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-LM passes to every `sharded_state_dict`, and stores."""
    found = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if s["optimizer"] == "distributed":
        found |= {"distrib_optim_sharding_type": s["sharding"]}
        if s["sharding"] == "fully_reshardable":
            found |= {"distrib_optim_fully_reshardable_mem_efficient": True}
    return found | s["metadata"]


def state(model: Any, optimizer: Any, s: dict[str, Any], loading: bool) -> dict[str, Any]:
    """The whole sharded state dict, as `generate_state_dict` of Megatron-LM puts it together."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.parallel_state import get_data_parallel_rank, get_pipeline_model_parallel_rank, get_tensor_model_parallel_rank

    about = metadata(s)
    found: dict[str, Any] = {"args": arguments(s), "checkpoint_version": 3.0, "iteration": s["iteration"]}
    found["model"] = model.sharded_state_dict(metadata=dict(about))
    if optimizer is not None:
        found["optimizer"] = optimizer.sharded_state_dict(found, is_loading=loading, metadata=dict(about))
        found["opt_param_scheduler"] = {
            "max_lr": 1e-2,
            "lr_warmup_steps": 8,
            "num_steps": 40,
            "lr_decay_style": "cosine",
            "lr_decay_steps": 80,
        }
    place = get_pipeline_model_parallel_rank(), get_tensor_model_parallel_rank()
    rng = [{"torch_rng_state": torch.get_rng_state()}]
    found["rng_state"] = ShardedObject("rng_state", rng, (s["pp"], s["tp"]), place, replica_id=get_data_parallel_rank())
    return found


def held(model: Any, optimizer: Any, s: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's parameters and their masters and moments, by name."""
    found = {f"model/{name}": p.detach().clone() for name, p in model.named_parameters()}
    if optimizer is None:
        return found
    inner, names = optimizer.chained_optimizers[0], {p: name for name, p in model.named_parameters()}
    if s["optimizer"] != "distributed":
        for p, name in names.items():
            main = p.main_param if s["dtype"] == "bfloat16" else p
            states = {"master": main, **inner.optimizer.state[main]}
            found |= {f"{key}/{name}": states[key].detach().clone() for key in ("master", "exp_avg", "exp_avg_sq")}
        return found
    gathered = inner.get_parameter_state_dp_zero(use_gloo_comm=True, return_on_all_ranks=True)
    for number, buffer in enumerate(inner.buffers):
        ((_, world),) = gathered[number].items()
        for p, (start, end, _) in buffer.param_index_map.items():
            for key, ours in {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
                found[f"{ours}/{names[p]}"] = world[key][start:end].reshape(p.shape).clone()
    return found


def keep_step(optimizer: Any) -> None:
    """megatron-core 0.16.1 looks for torch Adam's `step` among the stored tensors, where neither it nor Megatron-LM puts it: its own
    checkpoints do not load either without Transformer Engine's Adam, which has none."""
    inner = optimizer.chained_optimizers[0]
    take = inner._set_main_param_and_optimizer_states

    def with_step(p: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = inner.model_param_group_index_map[p]
        main = inner.optimizer.param_groups[group]["params"][order]
        take(p, tensors | {"step": inner.optimizer.state[main]["step"]})

    inner._set_main_param_and_optimizer_states = with_step


def one(what: str, folder: Path, s: dict[str, Any]) -> None:
    """Write or load one checkpoint, and store what the model and its optimizer hold then."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(s["tp"], s["pp"], create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(s["seed"])
    torch.manual_seed(s["seed"])
    model = build(s).to("cuda" if torch.cuda.is_available() else "cpu", getattr(torch, s["dtype"]))  # as Float16Module does, norms included
    ddp, optimizer = optimizer_of(model, s) if s["optimizer"] else (None, None)
    checkpoint = folder / f"iter_{s['iteration']:07d}"
    if what == "write":
        if optimizer is not None:
            train(ddp, optimizer, s)
        if s["fp8"]:
            logits_of(model, s)  # fills the amax histories that `_extra_state` holds
        if dist.get_rank() == 0:
            checkpoint.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state(model, optimizer, s, False), str(checkpoint), content_metadata=metadata(s))
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(s["iteration"]))
    else:
        if optimizer is not None:
            train(ddp, optimizer, s | {"steps": 1})  # torch's Adam has no states to load into before its first step
        asked = state(model, optimizer, s, True)
        del asked["rng_state"]
        loaded = dist_checkpointing.load(asked, str(checkpoint), strict=StrictHandling.ASSUME_OK_UNEXPECTED)
        model.load_state_dict(loaded["model"])
        if optimizer is not None:
            keep_step(optimizer)
            optimizer.load_state_dict(loaded["optimizer"])
    expected = {"held": {key: x.cpu() for key, x in held(model, optimizer, s).items()}, "logits": logits_of(model, s)}
    torch.save(expected, folder / f"{what}_{dist.get_rank()}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    # megatron-core only forgets its groups, and the threads of each gloo group wake a hundred times a second for as long as it lives.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def forked() -> list[int]:
    """Where no RANK is set: import megatron-core, 4 s, once for all ranks, then be each of them; rank 0 gets the ids of the others.

    After an import that asks CUDA what it has no fork can use it: with a GPU each rank is a program of its own, with RANK.
    """
    if "RANK" in os.environ:
        return []
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    others: list[int] = []
    os.environ["RANK"] = "0"
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        others.append(os.fork())
        if not others[-1]:
            os.environ["RANK"] = str(rank)
            return []
    return others


def main() -> None:
    what, folder, cases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    others = forked()
    assert not any(name.split(".")[0] == "msamp" for name in sys.modules)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist_rank := int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", dist_rank))
    else:
        pretend_cuda()
        dist.init_process_group("gloo")
    for name, case in cases.items():
        one(what, folder / name, DEFAULTS | case)
    dist.destroy_process_group()
    assert not any(os.waitpid(other, 0)[1] for other in others), "another rank failed"


if __name__ == "__main__":
    main()
