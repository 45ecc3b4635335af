"""Resume from the newest complete checkpoint of any grid and recipe, with or without ZeRO."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.lm.checkpoint import rng
from megatron.lm.checkpoint.content import at, print_changes, shrinking_attention
from megatron.lm.checkpoint.files import non_persistent
from megatron.lm.checkpoint.files.folder import INFO_FILE, check_files, first_complete, is_torch_dist, no_checkpoint, read_info
from megatron.lm.checkpoint.files.storage import Stored
from megatron.lm.checkpoint.files.versions import check_info, check_sizes
from megatron.lm.checkpoint.foreign import megatron
from megatron.lm.checkpoint.foreign.megatron import read_megatron
from megatron.lm.checkpoint.foreign.torch_dist import TorchDist, read_common
from megatron.lm.checkpoint.forms.expert_tensors import as_wanted
from megatron.lm.checkpoint.place import Place, names_of, places
from megatron.lm.checkpoint.tensor_reader import TensorReader, check_number, saved_scaling
from megatron.lm.checkpoint.values import chunk_offsets
from megatron.lm.config import CheckpointConfig, Config, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig, flag
from megatron.lm.config.cli import config_from_dict, config_to_dict
from megatron.lm.config.from_checkpoint import Saved
from megatron.lm.config.saved_schedule import differing_schedule
from megatron.lm.config.sections.batch_sizes import BatchSizes
from megatron.lm.config.sections.parallel import AXES
from megatron.lm.data.reading.order import check_same
from megatron.lm.processes import process_groups
from megatron.lm.processes.agreement import all_or_none
from megatron.lm.processes.grid import Grid
from megatron.lm.training.state import Training
from msamp.comm.grad_scaling import MU_MAX
from msamp.numerics.formats import by_name
from msamp.optim import updates
from msamp.optim.states import weight_format

# Settings of the model that may change on resume, because saved values keep their meaning.
_FREE = {
    *("attention_backend", "hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
}
# The rotary embedding's scaling, which --finetune may change to train on longer sequences.
_STRETCHED = {"use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"}
_MOST_BIAS = 2.0**24  # of a router; FP32 loses the scores that a larger one is added to


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint of ours or of Megatron-LM, read once: its folder, the plain values of `checkpoint.json`, the configuration of the run
    that wrote it, and its tensors."""

    folder: Path
    info: dict[str, Any]
    config: Config
    stored: Stored

    @classmethod
    def opened(cls, folder: Path, training: Training) -> "SavedCheckpoint":
        """Open a checkpoint; each rank checks the digests of its share of the files.

        Raises:
            ValueError: if it is damaged.
        """
        stored: Stored
        if is_foreign(folder):
            own, in_samples = training.config, training.schedule.in_samples
            info, stored = read_megatron(folder, training.vocab_size, in_samples=in_samples, finetune=own.checkpoint.finetune)
            config = megatron.configuration(folder, read_common(folder), own.model, own.optimizer, own.training, own.data)
            info["config"] = config_to_dict(config)
        else:
            info, rank, ranks = read_info(folder), dist.get_rank(), dist.get_world_size()
            judge(folder, info)
            check_files(folder, {name: entry for i, (name, entry) in enumerate(sorted(info["files"].items())) if i % ranks == rank})
            stored = open_stored(folder, info)
        return cls(folder=folder, info=info, config=config_from_dict(info["config"]), stored=stored)


@dataclass(kw_only=True)
class _Taken:
    """A rank's part of a checkpoint, in the formats of this run, on the CPU.

    Attributes:
        model: weights and buffers, by local name.
        values: FP32 values from which master weights start, by local name; only without states.
        states: of the optimizer's holdings, in their order; without `with_states` only the second components of weights.
        mu: by local name.
        loss_scale: state of FP16's dynamic loss scale; None if the saved run or this one has none.
        rng: None if the checkpoint has none for this rank.
        with_states: whether the optimizer's states are loaded; else they start from zero.
        requantised: tensors that could not keep their bits.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    mu: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    rng: dict[str, Tensor] | None = None
    with_states: bool = False
    requantised: set[str] = field(default_factory=set)


def load(training: Training) -> None:
    """Resume from `--load`: the marked checkpoint there, a newer one of `--non-persistent-save-interval`, or the one of `--ckpt-step`; with
    `--finetune` only the weights, at iteration 0. Collective.

    If a checkpoint is damaged, unhealthy or has invalid values, an older one of the same run is loaded and a line reports it, unless
    `--ckpt-step` names the checkpoint.

    Grid, ZeRO and recipe may differ from the saved run's; `values` describes which bits are kept. Casts that the saved run did not have
    start with just-in-time scales.

    Raises:
        ValueError: on every rank, if there is no checkpoint, or it is damaged or of another model or other data. Nothing was changed.
    """
    training.optimizer.wait()  # a rollback: weights that are still being gathered would overwrite those of the checkpoint
    settings = training.config.checkpoint
    assert settings.load is not None
    offered: list[Any] = [all_or_none(lambda: non_persistent.candidates_of(settings))]
    dist.broadcast_object_list(offered, 0)  # other ranks may see the folder in another state
    problems: list[str] = []
    for folder in offered[0].folders:
        try:
            saved = all_or_none(lambda folder=folder: SavedCheckpoint.opened(folder, training))  # type: ignore[misc]
        except ValueError as problem:
            problems.append(f"passed over: {problem}")
            continue
        remark = all_or_none(lambda saved=saved: _check_fits(saved, training))  # type: ignore[misc]
        try:
            taken = all_or_none(lambda saved=saved: _take(training, saved))  # type: ignore[misc]
        except ValueError as problem:
            problems.append(f"passed over: {problem}")
            continue
        break
    else:
        raise no_checkpoint(Path(settings.load), settings.ckpt_step, [*offered[0].remarks, *problems])
    if dist.get_rank() == 0:
        for text in (*offered[0].remarks, *problems, *([remark] if remark is not None else [])):
            print(text, flush=True)
    _apply(training, taken, saved)
    if not settings.finetune:
        if dist.get_rank() == 0:
            then, now = saved.config, training.config
            if (warning := shrinking_attention(saved.info, saved.folder)) is not None:
                print(warning, flush=True)
            print_changes(saved.info, (then.parallel, now.parallel), (then.precision, now.precision), taken.requantised)
        if dist.get_rank() == 0 and not taken.with_states and not settings.no_load_optim and saved.info["iteration"]:
            print(f"{saved.folder} was saved with --no-save-optim: the optimizer's state is initialized", flush=True)


def is_foreign(folder: Path) -> bool:
    """Return whether Megatron-LM wrote the checkpoint, and not this trainer in either of its formats."""
    return is_torch_dist(folder) and not (folder / INFO_FILE).is_file()


def open_stored(folder: Path, info: dict[str, Any]) -> Stored:
    """Return the tensors of a checkpoint of this trainer, in either of its formats."""
    if info.get("format") == "torch_dist":
        return TorchDist(folder, read_common(folder), info["files"])
    return Stored(folder, info["files"])


def judge(folder: Path, info: dict[str, Any]) -> None:
    """Raise a ValueError with the checkpoint's name if its `checkpoint.json` has an invalid entry."""
    try:
        check_info(info)
    except ValueError as problem:
        raise ValueError(f"{folder} {problem}") from None


def _check_fits(saved: SavedCheckpoint, training: Training) -> str | None:
    """Raise a ValueError with every setting that differs and changes the meaning of saved values; older checkpoints would not match either.

    Returns a message about the data.
    """
    info, config, finetune = saved.info, training.config, training.config.checkpoint.finetune
    # A setting that the checkpoint does not have is newer, and the saved run had its default.
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
    now, then = config_to_dict(config)["model"], defaults | info["config"].get("model", {})
    same_table = then.get("max_position_embeddings") == config.model.max_position_embeddings is not None
    relative = config.model.position_embedding_type != "learned_absolute"
    free = _FREE | (_STRETCHED if finetune else set()) | ({"seq_length"} if finetune and (relative or same_table) else set())
    if saved.config.model.moe_layers == config.model.moe_layers:
        free.add("moe_layer_freq")  # written in another way
    differing = [f"{flag(k)} {v} (saved: {then.get(k)})" for k, v in now.items() if k not in free and then.get(k) != v]
    if "megatron_args" in info:
        differing = megatron.differing(info["megatron_args"], config.model, free)
    if info["vocab_size"] != training.vocab_size:
        differing.append(f"a tokenizer of {training.vocab_size} tokens (saved: {info['vocab_size']})")
    if not finetune:
        if (last := config.iterations(dist.get_world_size())) < info["iteration"]:
            differing.append(f"{last} iterations by --train-iters or --train-samples (saved: {info['iteration']} are done; give more)")
        differing += _differing_batches(info, config.batch_sizes(dist.get_world_size()), config.training.rampup_batch_size)
        differing += [] if config.checkpoint.no_load_optim else differing_schedule(config, saved.config)
    if differing:
        raise ValueError(f"the checkpoint in {config.checkpoint.load} does not match: {'; '.join(differing)}. Use the saved values")
    scale, least = _loss_scale(info, training), config.precision.min_loss_scale
    if scale is not None and scale["loss_scale"] < least:
        raise ValueError(
            f"the loss scale in {config.checkpoint.load} is {scale['loss_scale']:g}, below --min-loss-scale {least:g}: lower it, "
            "or initialize the optimizer with --no-load-optim"
        )
    if finetune:
        return None
    return check_same(info, training.data, config.data, seq_length=config.model.seq_length, load=config.checkpoint.load)


def _differing_batches(info: dict[str, Any], sizes: BatchSizes, ramp: Sequence[int]) -> list[str]:
    """Return the batch-size flag if this run's iterations up to the checkpoint would have read other samples than the saved run did."""
    before, iteration = info["consumed_samples"], info["iteration"]
    if sizes.consumed(iteration) == before:
        return []
    saved = info["config"].get("training", {}).get("rampup_batch_size") or []
    if sizes.ramp is not None or saved:
        ramps = [" ".join(map(str, words)) or "none" for words in (ramp, saved)]
        return [f"--rampup-batch-size {ramps[0]} to --global-batch-size {sizes.final} (saved: {ramps[1]}, {before} samples read)"]
    return [f"--global-batch-size {sizes.final} (saved: {before // max(1, iteration)})"]


def _take(training: Training, saved: SavedCheckpoint) -> _Taken:
    """Read and check this rank's part of a checkpoint, without changing `training`; raise a ValueError if it is damaged or incomplete."""
    settings, where, stored, info = training.config.checkpoint, places(training.model), saved.stored, saved.info
    if isinstance(stored, TorchDist):
        megatron.check_names(stored, (place.name for of_name in where.values() for place in of_name), training.config.model.num_layers)
    stored = as_wanted(stored, {place.name for of_name in where.values() for place in of_name})
    taken = _Taken(with_states=_with_states(settings, saved))
    reader = TensorReader(stored, info["vocab_size"], taken.requantised, info["iteration"])
    masters = {p: by_name(group["formats"]["master"]) for group in training.optimizer.param_groups for p in group["params"]}
    gemm = training.config.precision.recipe.gemm
    for name, p in training.model.named_parameters():
        taken.model[name], values = reader.weight(p, masters[p], where[name], gemm, with_values=not taken.with_states)
        if values is not None:
            taken.values[name] = values
    taken.model |= _expert_biases(training.model, stored, where)
    if not settings.finetune:
        taken.model |= saved_scaling(training.model, stored, where)
        taken.rng = None if settings.no_load_rng else _take_rng(training, saved)
    names = names_of(training.model)
    for holding in training.optimizer.holdings():
        if holding.param not in names:  # a parameter outside the model, such as a classifier head, which checkpoints do not contain
            continue
        at_place = where[names[holding.param]]
        state = reader.state(holding, at_place) if taken.with_states else reader.weight_remainder(holding, at_place)
        if state:
            taken.states[holding.place] = state
    if taken.with_states:
        taken.loss_scale = _loss_scale(info, training)
        if taken.loss_scale is not None:
            training.loss_scaler.check_state(taken.loss_scale)  # type: ignore[union-attr]
        taken.mu = _mu(training, stored, where)
    return taken


def _with_states(settings: CheckpointConfig, saved: SavedCheckpoint) -> bool:
    """Return whether the optimizer's states are loaded; raise a ValueError if a run would resume without them."""
    stored = saved.stored
    if settings.finetune or settings.no_load_optim:
        return False
    if isinstance(stored, TorchDist) and stored.moments_refused is not None:
        raise ValueError(stored.moments_refused)
    held = any(key.partition("/")[0] in updates.own_keys() for key in stored.tensors)
    if not held and saved.info["config"].get("checkpoint", {}).get("no_save_optim") is True:
        return False
    if not held and saved.info["iteration"]:
        raise ValueError(f"{stored.folder} contains only weights; load them with --finetune, or resume without states with --no-load-optim")
    return held


def _mu(training: Training, stored: Stored, where: dict[str, list[Place]]) -> dict[str, Tensor]:
    """Return the saved mu of automatic gradient scaling (FP8-LM equation 3), by local name; the minimum if parts have their own."""
    smallest = {}
    for name in training.grad_sync.state_dict()["mu"]:
        keys = [at(f"mu/{place.name}", offset) for place, offset in chunk_offsets(stored, where[name])]
        values = [stored.tensor(key) for key in keys if key in stored.tensors]
        for mu in values:
            check_number(stored, f"mu/{name}", mu, 0, MU_MAX, torch.float64)
        if values:
            smallest[name] = torch.stack(values).amin()
    return smallest


def _loss_scale(info: dict[str, Any], training: Training) -> dict[str, Any] | None:
    """Return the state of the saved dynamic loss scale; None if there is none, or this run uses none."""
    settings, scaler = training.config.checkpoint, training.loss_scaler
    return None if settings.finetune or settings.no_load_optim or scaler is None or not scaler.dynamic else info.get("loss_scale")


def take_model(model: nn.Module, stored: Stored, vocab_size: int) -> None:
    """Load the weights as saved, and the scales of casts, into a model for inference."""
    where, reader = places(model), TensorReader(stored, vocab_size, set())
    weights = {name: reader.find("model", where[name], p.shape).to(weight_format(p), p.dtype) for name, p in model.named_parameters()}
    model.load_state_dict(weights | saved_scaling(model, stored, where) | _expert_biases(model, stored, where), strict=False)


def _expert_biases(model: nn.Module, stored: Stored, where: dict[str, list[Place]]) -> dict[str, Tensor]:
    """Return the saved biases of the routers, which are a part of the model; ValueError if one is missing or invalid."""
    biases = {name: x for name, x in model.named_buffers() if name.endswith(".router.expert_bias") and name in where}
    for name, own in biases.items():
        key = f"model/{where[name][0].name}"
        bias = stored.tensor(key) if key in stored.tensors else None
        if bias is None or bias.dtype != own.dtype or bias.shape != own.shape or not (bias.abs() <= _MOST_BIAS).all():
            raise ValueError(
                f"{stored.folder} is damaged: {key} is not {tuple(own.shape)} FP32 values in [-2^24, 2^24]; load an older checkpoint"
            )
        biases[name] = bias
    return biases


def _take_rng(training: Training, saved: SavedCheckpoint) -> dict[str, Tensor] | None:
    stored, then, now = saved.stored, saved.config.parallel, training.config.parallel
    prefix = f"rng/{rng.own_number(training.grid)}/"
    same = all(getattr(then, AXES[axis]) == getattr(now, AXES[axis]) for axis in ("tensor", "context", "pipeline"))
    states = {key.removeprefix(prefix): stored.tensor(key) for key in stored.tensors if key.startswith(prefix)} if same else {}
    if states:
        try:
            rng.check(states)
        except ValueError as problem:
            raise ValueError(f"{stored.folder}: {problem}; load an older checkpoint, or use new ones with --no-load-rng") from None
    return states or None


def _restore_rng(taken: _Taken, settings: CheckpointConfig) -> None:
    """Set this rank's generators, and print on how many ranks they keep the state from `--seed`. Collective."""
    lacking = torch.tensor(taken.rng is None, dtype=torch.int32, device=process_groups.device())
    # Ranks that share a part of the data must draw the same dropout for the same activations.
    dist.all_reduce(lacking, dist.ReduceOp.MAX, Grid.current().model.group)
    if taken.rng is not None and not lacking:
        rng.restore(taken.rng)
    dist.all_reduce(lacking)
    if dist.get_rank() == 0 and lacking and not settings.no_load_rng:
        places = f"{int(lacking)} of {dist.get_world_size()} places in the grid"
        print(f"{settings.load} has no random states for {places}: dropout there starts from --seed", flush=True)


def _apply(training: Training, taken: _Taken, saved: SavedCheckpoint) -> None:
    settings, optimizer, info = training.config.checkpoint, training.optimizer, saved.info
    training.model.load_state_dict(taken.model, strict=False)
    optimizer.take_states(taken.states)
    if not taken.with_states:
        named = training.model.named_parameters()
        optimizer.init_masters((p, taken.values[name]) for name, p in named if name in taken.values)
    else:
        if training.loss_scaler is not None and taken.loss_scale is not None:
            training.loss_scaler.load_state_dict(taken.loss_scale)
        training.grad_sync.load_state_dict({"steps": info["grad_sync_steps"], "mu": taken.mu})
    training.run = training.run.resumed(info) if settings.resumes_itself else training.run.child_of(info, settings.finetune)
    if settings.finetune:
        return
    training.problem = None
    _restore_guard(training, info)
    optimizer.skipped_steps = info["skipped_steps"]
    # The position in the schedule; its shape is this run's, which equals the saved one without --override-opt-param-scheduler.
    training.schedule.apply_pending()
    training.schedule.num_steps = _schedule_place(training, saved)
    training.schedule.step(0)
    training.iteration = info["iteration"]
    training.consumed_samples = info["consumed_samples"]
    training.passed_over = info["passed_over"]
    _restore_rng(taken, settings)


def _restore_guard(training: Training, info: dict[str, Any]) -> None:
    """Raise the layers that `--fp8-guard` had raised in the saved run, and print on rank 0 which of them this run does not guard."""
    saved = (info.get("fp8_guard") or {"layers": {}})["layers"]
    if training.guard is not None:
        training.guard.load_state_dict({"layers": {name: state for name, state in saved.items() if name in training.guard.names}})
    gone = [name for name, state in saved.items() if state["raised"] and (training.guard is None or name not in training.guard.names)]
    if gone and dist.get_rank() == 0:
        why = "without --fp8-guard" if training.guard is None else "since they are not FP8 layers now,"
        print(
            f"the saved run's --fp8-guard had raised {len(gone)} layers to BF16, such as {gone[0]}; {why} they compute as the recipe says"
        )


def _schedule_place(training: Training, saved: SavedCheckpoint) -> int:
    """Return the steps of this run's schedule that the saved run has done, converted between iterations and samples if needed."""
    info, then = saved.info, saved.config.schedule_steps.in_samples
    steps: int = info["schedule_steps"]
    if then == training.schedule.in_samples or not steps:
        return steps
    if then:
        return info["iteration"] - info["skipped_steps"]  # type: ignore[no-any-return]
    return steps * (info["consumed_samples"] // info["iteration"])  # type: ignore[no-any-return]


def newest(settings: CheckpointConfig) -> Path:
    """Return the checkpoint that a run with these settings loads first; ValueError if there is none."""
    assert settings.load is not None
    offered = non_persistent.candidates_of(settings)
    if offered.folders and is_foreign(offered.folders[0]):
        return offered.folders[0]
    return first_complete(Path(settings.load), settings.ckpt_step, offered)[0]


def saved_precision(settings: CheckpointConfig) -> PrecisionConfig | None:
    """Return the precision settings of the run that a start with these settings resumes; None if there is none, or it is Megatron-LM's.
    Raise a ValueError for a damaged checkpoint."""
    saved = _resumed(settings)
    return None if saved is None or is_foreign(saved) else _own_config(saved).precision


def saved_schedule(
    settings: CheckpointConfig, optimizer: OptimizerConfig, training: TrainingConfig
) -> tuple[OptimizerConfig, TrainingConfig] | None:
    """Return the sections with the schedule of the run that a start with these settings resumes, or None; for Megatron-LM from this run's
    sections (`foreign.megatron.schedule`). Raise a ValueError for a damaged checkpoint."""
    saved = _resumed(settings)
    if saved is None:
        return None
    if is_foreign(saved):
        return megatron.schedule(saved, read_common(saved), optimizer, training)
    config = _own_config(saved)
    return config.optimizer, config.training


def _own_config(folder: Path) -> Config:
    config = config_from_dict(read_info(folder)["config"])
    try:
        check_sizes(config.model, config.precision)
    except ValueError as problem:
        raise ValueError(f"{folder} {problem}") from None
    return config


def _resumed(settings: CheckpointConfig) -> Path | None:
    return None if settings.load is None or settings.finetune else newest(settings)


def saved_settings(settings: CheckpointConfig) -> Saved:
    """Return the settings of the checkpoint in `--load`, by section, converted from Megatron-LM's arguments if needed; raise a ValueError
    if it cannot be read."""
    folder = newest(settings)
    if is_foreign(folder):
        return megatron.settings(megatron.arguments(read_common(folder)))
    saved: Saved = read_info(folder)["config"]
    return saved
