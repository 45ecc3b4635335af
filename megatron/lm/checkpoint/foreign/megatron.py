"""Read a checkpoint of Megatron-LM as one of ours: check its model against this run's flags, and convert iteration, samples and
schedule."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron.lm.checkpoint.files.folder import RELEASE
from megatron.lm.checkpoint.files.index import natural
from megatron.lm.checkpoint.foreign.names import layer_of
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, common_state, names_of_weights, read_common
from megatron.lm.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.cli import section_from_dict
from megatron.lm.config.sections.schema import flag


def read_megatron(folder: Path, vocab_size: int, *, in_samples: bool, finetune: bool) -> tuple[dict[str, Any], TorchDist]:
    """Return the equivalent of our `checkpoint.json`, except for its `config`, for a checkpoint of Megatron-LM, and its tensors.

    Args:
        folder: of the checkpoint.
        vocab_size: of this run's tokenizer, which the checkpoint is assumed to have: it only stores the number of embedding rows.
        in_samples: whether this run's schedule counts samples.
        finetune: whether only the weights are loaded.

    Raises:
        ValueError: if the checkpoint cannot be read, or has no iteration from which to resume.
    """
    if folder.name == RELEASE and not finetune:
        raise ValueError(f"{folder} is a release of Megatron-LM, which has no iteration: load its weights with --finetune")
    common = read_common(folder)
    stored = TorchDist(folder, common)
    args = arguments(common)
    try:
        iteration = natural(common.get("iteration", 0))
        consumed = natural(args.get("consumed_train_samples", 0) or 0)
        samples = natural(_schedule(common).get("num_steps", consumed))
        step = natural(stored.step)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{folder} has an invalid count ({error}); load an older checkpoint") from None
    info = {
        **dict.fromkeys(("passed_over", "skipped_steps"), 0),
        "iteration": iteration,
        "consumed_samples": consumed,
        "schedule_steps": samples if in_samples else min(iteration, samples // _samples_per_step(args, consumed, iteration)),
        "grad_sync_steps": step,
        "processes": args.get("world_size") or _size(args, "tensor") * _size(args, "pipeline"),
        "vocab_size": vocab_size,
        "loss_scale": _loss_scale(common),
        "seal": hashlib.sha256(common_state(folder)[1]).hexdigest(),
        "megatron_args": args,
    }
    return info, stored


def _loss_scale(common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return FP16's dynamic loss scale in the form that `msamp.fp16.scaler` loads; None if the checkpoint has none."""
    optimizer = common.get("optimizer")
    match optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None:
        case {"scale": float(scale), "growth_tracker": int(good), "hysteresis_tracker": int(left)} if scale > 0 and min(good, left) >= 0:
            return {"loss_scale": scale, "unskipped": good, "overflows_left": left}
    return None


def arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments by name; empty if the checkpoint has none."""
    args = common.get("args")
    return args if isinstance(args, dict) else {}


def _size(args: Mapping[str, Any], axis: str) -> int:
    size = args.get(f"{axis}_model_parallel_size")
    return size if type(size) is int and size > 0 else 1


def configuration(
    folder: Path, common: Mapping[str, Any], model: ModelConfig, optimizer: OptimizerConfig, training: TrainingConfig, data: DataConfig
) -> Config:
    """Return the configuration of the run that wrote the checkpoint in `folder`: this run's sections with the precision, grid, data and
    `schedule` of the checkpoint.

    Raises:
        ValueError: as `schedule`.
    """
    args = arguments(common)
    precision = "fp16-amp" if args.get("fp16") is True else "bf16" if args.get("bf16") is True else "fp32"  # only for the log
    optimizer, training = schedule(folder, common, optimizer, training)
    of_samples = ("split", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    return Config(
        model=model,
        optimizer=optimizer,
        training=training,
        data=replace(data, **_of_same_type(args, data, of_samples)),
        precision=PrecisionConfig(precision=precision),
        parallel=ParallelConfig(tensor_model_parallel_size=_size(args, "tensor"), pipeline_model_parallel_size=_size(args, "pipeline")),
    )


def schedule(
    folder: Path, common: Mapping[str, Any], optimizer: OptimizerConfig, training: TrainingConfig
) -> tuple[OptimizerConfig, TrainingConfig]:
    """Return this run's sections with the seed, length and schedule of the checkpoint in `folder`.

    The length and the schedule are converted to this run's unit, iterations or samples: Megatron-LM stores samples.

    Raises:
        ValueError: the checkpoint records a length or a schedule that no run has.
    """
    args, in_samples = arguments(common), training.train_samples is not None
    given = _of_same_type(args, training, ("seed", "train_samples" if in_samples else "train_iters"))
    try:
        if "rampup_batch_size" in args:
            given["rampup_batch_size"] = [int(word) for word in args["rampup_batch_size"] or ()]
        rates, length = asdict(optimizer) | _optimizer(common, in_samples), asdict(training) | given
        return section_from_dict(OptimizerConfig, "optimizer", rates), section_from_dict(TrainingConfig, "training", length)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} has an invalid schedule ({error}); load an older checkpoint") from None


def _of_same_type(args: Mapping[str, Any], section: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of these names that have the same type as the section's values."""
    return {name: args[name] for name in names if type(args.get(name)) is type(getattr(section, name))}


def _optimizer(common: Mapping[str, Any], in_samples: bool) -> dict[str, Any]:
    """Return learning rate and weight decay of the checkpoint, by field of `OptimizerConfig`."""
    args, schedule = arguments(common), _schedule(common)
    names = (*("lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"), "decoupled_lr", "decoupled_min_lr")
    settings = {name: args[name] for name in names if name in args}
    renamed = {"max_lr": "lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style", "end_wd": "weight_decay"}
    settings |= {name: schedule[key] for key, name in renamed.items() if key in schedule}
    if "lr_warmup_steps" not in schedule or "lr_decay_steps" not in schedule:
        return settings
    decay, warmup = natural(schedule["lr_decay_steps"]), schedule["lr_warmup_steps"]
    step = 1 if in_samples else _samples_per_step(args, natural(args.get("consumed_train_samples", 0) or 0), natural(common["iteration"]))
    unit, other = ("samples", "iters") if in_samples else ("iters", "samples")
    settings |= {f"lr_decay_{unit}": decay // step, f"lr_decay_{other}": None, f"lr_warmup_{other}": 0, "lr_warmup_fraction": None}
    if warmup % step:  # --lr-warmup-fraction may give any number
        return settings | {f"lr_warmup_{unit}": 0, "lr_warmup_fraction": warmup / decay}
    return settings | {f"lr_warmup_{unit}": int(warmup // step)}


def _samples_per_step(args: Mapping[str, Any], consumed: int, iteration: int) -> int:
    """Return the samples per iteration of a run with a constant batch size."""
    return args.get("global_batch_size") or max(1, consumed // max(1, iteration))


def _schedule(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of Megatron-LM's learning-rate schedule; raise an AttributeError if it is not a dictionary."""
    schedule = common.get("opt_param_scheduler") or {}
    schedule.keys()
    return schedule  # type: ignore[no-any-return]


def settings(args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the flags of model, tokenizer and grid, by section, for the model of Megatron-LM's arguments."""
    renamed = dict(args)
    if isinstance(bias := args.get("add_bias_linear"), bool):
        renamed["disable_bias_linear"] = not bias
    if "norm_epsilon" not in args and "layernorm_epsilon" in args:
        renamed["norm_epsilon"] = args["layernorm_epsilon"]
    if args.get("group_query_attention") is False:
        renamed["num_query_groups"] = None
    sections = {"model": ModelConfig, "data": DataConfig, "parallel": ParallelConfig}
    of_the_run = {"data_path", "train_data_path", "valid_data_path", "test_data_path"}
    return {
        section: {f.name: renamed[f.name] for f in fields(cls) if renamed.get(f.name) is not None and f.name not in of_the_run}
        for section, cls in sections.items()
    }


def differing(args: Mapping[str, Any], model: ModelConfig, free: Collection[str] = ()) -> list[str]:
    """Return the flags of `model` that differ from Megatron-LM's arguments, each with its value and the checkpoint's.

    The settings in `free` may differ.
    """
    now = asdict(model) | {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "max_position_embeddings": model.max_positions,
    }
    names = ["num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "normalization", "swiglu"]
    names += ["squared_relu", "qk_layernorm", "position_embedding_type", "untie_embeddings_and_output_weights"]
    if model.position_embedding_type == "rope":
        names += ["rotary_base", "rotary_percent", "use_rope_scaling", *(["rope_scaling_factor"] if model.use_rope_scaling else [])]
    if model.position_embedding_type == "learned_absolute":
        names.append("max_position_embeddings")
    mismatches = [
        _mismatch(name, now[name], args[name])
        for name in names
        if name not in free and args.get(name) is not None and args[name] != now[name]
    ]
    factor, name = args.get("rotary_seq_len_interpolation_factor"), "rotary_seq_len_interpolation_factor"
    if model.position_embedding_type == "rope" and (model.rotary_seq_len_interpolation_factor or 1) != (factor or 1) and name not in free:
        mismatches.append(_mismatch(name, model.rotary_seq_len_interpolation_factor, factor))
    epsilon = args.get("norm_epsilon", args.get("layernorm_epsilon"))
    if epsilon is not None and epsilon != model.norm_epsilon:
        mismatches.append(_mismatch("norm_epsilon", model.norm_epsilon, epsilon))
    if isinstance(bias := args.get("add_bias_linear"), bool) and bias == model.disable_bias_linear:
        mismatches.append(_mismatch("disable_bias_linear", model.disable_bias_linear, not bias))
    elif bias is False and isinstance(args.get("add_qkv_bias"), bool) and args["add_qkv_bias"] != model.add_qkv_bias:
        mismatches.append(_mismatch("add_qkv_bias", model.add_qkv_bias, args["add_qkv_bias"]))
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups") if args.get("group_query_attention") is True else heads
    if groups is not None and groups != model.query_groups:
        mismatches.append(_mismatch("num_query_groups", model.query_groups, groups))
    return mismatches


def _mismatch(name: str, now: Any, then: Any) -> str:
    return f"{flag(name)} {now} (saved: {then})"


def check_names(stored: TorchDist, own: Iterable[str], num_layers: int) -> None:
    """Raise a ValueError if the checkpoint has weights that the model does not have, such as experts, or layers after its last.

    `own`: names of a pipeline stage's weights in the whole model.
    """
    suffixes = {suffix for layer, suffix in map(layer_of, own) if layer is not None}
    ends = ("embedding.word_embeddings.", "embedding.position_embeddings.", "decoder.final_layernorm.", "output_layer.")
    strange = [
        name
        for name in names_of_weights(stored)
        for layer, suffix in [layer_of(name)]
        if (layer is None and not name.startswith(ends)) or (layer is not None and (suffix not in suffixes or layer >= num_layers))
    ]
    if strange:
        raise ValueError(
            f"{stored.folder} has {len(strange)} weights that this model does not have, such as {strange[0]}: use the flags of the "
            "saved model (experts, multi-latent attention, multi-token prediction and HybridModel are not supported)"
        )
