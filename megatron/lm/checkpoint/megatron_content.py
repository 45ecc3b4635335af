"""Convert the content of our checkpoint to Megatron-LM's: FP32 master weights and moments, BF16 weights, stacked layers, `args`.

Scaled and COAT formats are dequantized. A weight that is its own master is stored twice, in BF16 as the weight and in FP32 as the master.
An FP8 weight with a separate master is stored as that master in BF16.
"""

import math
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint.content import group_keys, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign.names import LAYERS, theirs
from megatron.lm.checkpoint.place import places
from megatron.lm.config import ModelConfig, OptimizerConfig, TrainingConfig
from megatron.lm.config.cli import config_from_dict
from megatron.lm.config.sections.training import ScheduleSteps
from megatron.lm.training.state import Training
from msamp.numerics.formats import by_name
from msamp.numerics.range_expand import Expanded
from msamp.optim.states import is_own_master, weight_format
from msamp.optim.updates import MASTER, formats_of, update_of

_STATES = {MASTER.key: "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIMIZER = "optimizer.state."
_EXTRA = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.core_attention")
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


class MegatronContent(NamedTuple):
    """This rank's chunks under Megatron-LM's keys, the content of `common.pt`, and the keys of objects that are None."""

    items: list[Item]
    common: dict[str, Any]
    objects: list[str]


def check_states(training: Training) -> None:
    """Raise a ValueError if the run's optimizer has states that Megatron-LM's does not have."""
    kinds = [kind for group in training.optimizer.param_groups for kind in formats_of(group)]
    kept = [{state.key for state in update_of(kind).states} for kind in kinds]
    other = sorted({key for keys in kept for key in (keys - {MASTER.key}) ^ set(MOMENTS)})
    if other:
        raise ValueError(
            "--ckpt-format torch_dist supports the states of AdamW, exp_avg and exp_avg_sq, but the optimizer of this run differs in "
            f"{', '.join(other)}: save in the trainer's own format, without --ckpt-format"
        )


def of_training(training: Training, items: Sequence[Item], info: Mapping[str, Any]) -> MegatronContent:
    """Return the content that Megatron-LM would store for these `content.items` and this `content.info`; with `--no-save-optim` only
    weights. Collective.
    """
    steps = [int(state["step"]) for state in training.optimizer.state.values() if "step" in state]
    steps_of_ranks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(steps_of_ranks, max(steps, default=None))
    step = max((x for x in steps_of_ranks if x is not None), default=None)
    layers = training.config.model.num_layers
    own, rounded = _by_master(training) if step is not None else (set(), set())
    chunks = list(megatron_items(items, own, rounded, layers))
    if training.config.checkpoint.no_save_optim:
        chunks, step = [chunk for chunk in chunks if not chunk.key.startswith(_OPTIMIZER)], None
    return MegatronContent(chunks, common(info, step), extra_states(layers))


def _by_master(training: Training) -> tuple[set[str], set[str]]:
    """Return the names, in the whole model, of weights that are their own masters, and of scaled ones with a separate master."""
    masters = {p: by_name(group["formats"]["master"]) for group in training.optimizer.param_groups for p in group["params"]}
    own, rounded, where = set[str](), set[str](), places(training.model)
    for name, p in training.model.named_parameters():
        names = {place.name for place in where[name]}
        if p in masters and is_own_master(p, masters[p]):
            own |= names
        elif p in masters and weight_format(p).scaled:
            rounded |= names
    return own, rounded


def megatron_items(
    items: Sequence[Item], own_masters: Collection[str], rounded_masters: Collection[str], num_layers: int
) -> Iterator[Item]:
    """Yield this rank's chunks under Megatron-LM's keys: weights as they are or in BF16, states in FP32.

    Args:
        items: from `content.items`.
        own_masters: names, in the whole model, of weights with optimizer states but no separate master.
        rounded_masters: names of FP8 weights that are stored as their master rounded to BF16.
        num_layers: of the whole model.
    """
    beside = {item.key: item.tensor.cpu() for item in items if "@" in item.key}
    for item in items:
        prefix, _, name = item.key.partition("/")
        if prefix not in ("model", *_STATES) or ".scaling." in name or "@" in name:
            continue
        item = replace(item, tensor=item.tensor.detach().cpu())  # convert to FP32 in host memory
        largest, k = (beside.get(key) for key in group_keys(item.key, item.offset))
        scale = beside.get(scale_key(item.key, item.offset))
        if largest is not None and k is not None:
            values = Expanded(item.tensor, largest, k).dequantize()
        else:
            values = item.tensor.float() if scale is None else item.tensor.float() * scale
        if prefix in _STATES:
            yield _stacked(f"{_OPTIMIZER}{_STATES[prefix]}.", name, item, values, num_layers)
            if prefix == MASTER.key and name in rounded_masters:
                yield _stacked("", name, item, values.bfloat16(), num_layers)
            continue
        if name in rounded_masters:
            continue
        yield _stacked("", name, item, item.tensor if scale is None else values.bfloat16(), num_layers)
        if name in own_masters:
            yield _stacked(f"{_OPTIMIZER}{_STATES[MASTER.key]}.", name, item, values, num_layers)


def _stacked(prefix: str, name: str, item: Item, values: Tensor, num_layers: int) -> Item:
    key, layer = theirs(name)
    if layer is None:
        return Item(prefix + key, values, item.shape, item.offset)
    return Item(prefix + key, values[None], (num_layers, *item.shape), (layer, *item.offset))


def extra_states(num_layers: int) -> list[str]:
    """Return the keys of objects that a loader's linear layers and attention expect; they are None without FP8 layers."""
    return [f"{LAYERS}{module}._extra_state/shard_{layer}_{num_layers}" for module in _EXTRA for layer in range(num_layers)]


def common(info: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return `common.pt` for the checkpoint with this `info`. `step`: of the optimizer; None for a checkpoint of only weights."""
    config = config_from_dict(info["config"])
    about: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    optimizer, training, dtype = config.optimizer, config.training, config.precision.recipe.compute_dtype
    args = Namespace(
        **_model_arguments(config.model),
        **_run_arguments(optimizer, training, info, step is not None),
        padded_vocab_size=config.padded_vocab_size(info["vocab_size"]),
        tokenizer_type=config.data.tokenizer_type,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
    )
    content = {"args": args, "checkpoint_version": 3.0, "iteration": info["iteration"]}
    if step is not None:
        about |= _SHARDING
        content["opt_param_scheduler"] = _schedule(optimizer, config.schedule_steps, training.train_samples or training.train_iters, info)
        content["optimizer"] = {
            "optimizer": {"param_groups": [_group(optimizer, decay, step) for decay in (1.0, 0.0)]},
            "param_state_sharding_type": _SHARDING["distrib_optim_sharding_type"],
        }
        if (scale := info.get("loss_scale")) is not None:
            content["optimizer"]["grad_scaler"] = {
                "scale": torch.tensor([scale["loss_scale"]]),
                "growth_tracker": scale["unskipped"],
                "hysteresis_tracker": scale.get("overflows_left", 1),
            }
    return content | {"content_metadata": about}


def _schedule(optim: OptimizerConfig, steps: ScheduleSteps, length: int | None, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of Megatron-LM's learning-rate schedule, which always counts samples; `length`: of the run, in `steps`."""
    samples_per_step = 1 if steps.in_samples else info["consumed_samples"] // max(1, info["iteration"])
    assert length is not None
    return {
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": steps.warmup * samples_per_step,
        "lr_decay_steps": steps.decay * samples_per_step,
        "lr_decay_style": optim.lr_decay_style,
        "num_steps": info["schedule_steps"] * samples_per_step,
        **dict.fromkeys(("start_wd", "end_wd"), optim.weight_decay),
        "wd_incr_style": "constant",
        "wd_incr_steps": length * samples_per_step,
    }


def _group(optim: OptimizerConfig, decay: float, step: int) -> dict[str, Any]:
    return {
        "wd_mult": decay,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr": optim.lr,
        "weight_decay": optim.weight_decay * decay,
        "step": step,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "bias_correction": True,
    }


def _model_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments for the model."""
    same = (
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "group_query_attention", "normalization", "norm_epsilon"),
        *("swiglu", "squared_relu", "qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights"),
        *("position_embedding_type", "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "make_vocab_size_divisible_by"),
    )
    factor = model.rotary_seq_len_interpolation_factor
    return {name: getattr(model, name) for name in same} | {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "num_query_groups": model.query_groups if model.group_query_attention else 1,
        "max_position_embeddings": model.max_positions,
        "add_bias_linear": not model.disable_bias_linear,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "rotary_base": int(model.rotary_base) if math.isfinite(model.rotary_base) else model.rotary_base,
        "rotary_seq_len_interpolation_factor": int(factor) if factor is not None and factor.is_integer() else factor,
    }


def _run_arguments(optimizer: OptimizerConfig, training: TrainingConfig, info: Mapping[str, Any], with_states: bool) -> dict[str, Any]:
    """Return Megatron-LM's arguments for the run's length and schedule, and for missing parts of the checkpoint."""
    same = ("lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "decoupled_lr", "decoupled_min_lr")
    return {name: getattr(optimizer, name) for name in same} | {
        "train_iters": training.train_iters,
        "train_samples": training.train_samples,
        "rampup_batch_size": list(training.rampup_batch_size) or None,
        "use_distributed_optimizer": True,
        "global_batch_size": training.global_batch_size or info["consumed_samples"] // max(1, info["iteration"]) or None,
        "consumed_train_samples": info["consumed_samples"],
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "no_save_rng": True,
        "no_save_optim": not with_states,
    }
