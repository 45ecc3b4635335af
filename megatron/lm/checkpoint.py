"""Plain checkpoints: everything a resume needs, bit for bit, in one folder an iteration.

What data-parallel ranks share is in one file for each part of the model that tensor and pipeline parallelism cut it into, the
random states in one a rank, numbered so that each finds its own when there are more data-parallel ranks. Their number may change
on resume, the cut may not. A folder appears under its final name only when it is whole, and
`latest_checkpointed_iteration.txt` moves only after that, so a kill at any moment leaves the last good checkpoint. Files are read
with `weights_only=True`: no code runs.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from megatron.lm import process_groups
from megatron.lm.checks import LATEST_CHECKPOINT_FILE
from megatron.lm.cli import config_from_dict, config_to_dict
from megatron.lm.config import Config, flag
from megatron.lm.data.tokenizer import Tokenizer, build_tokenizer
from megatron.lm.model.gpt import build_model
from megatron.lm.model.linear import FP8Gemm
from megatron.lm.recipe import build_recipe
from megatron.lm.step import Training
from msamp.numerics.tensor import fp32_values

VERSION = 2
T = TypeVar("T")
_KEYS = ("version", "config", "vocab_size", "iteration", "consumed_samples", "skipped_steps", "model", "optimizer", "grad_sync", "schedule")
# Settings of the model that may change on resume: they give no saved number another meaning.
_HYPER = ("betas", "eps", "wd_mult")  # of a parameter group; lr and weight decay come with the schedule
_FREE = {"attention_backend", "hidden_dropout", "attention_dropout", "init_method_std"}
# Those that say how the model is cut, and (tp_wire) which scales have a history.
_GRID = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "tp_wire")


def state_file(tensor_rank: int = 0, pipeline_rank: int = 0) -> str:
    """Name of the file with one part of the model, in Megatron-LM's spelling."""
    return f"mp_rank_{tensor_rank:02d}_{pipeline_rank:03d}.pt"


def _own_state_file() -> str:
    return state_file(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())


def _own_rng_file() -> str:
    tensor, pipeline = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size()
    number = parallel_state.get_data_parallel_rank() * pipeline + parallel_state.get_pipeline_model_parallel_rank()
    return f"rng_{number * tensor + parallel_state.get_tensor_model_parallel_rank():05d}.pt"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration stands, in Megatron-LM's spelling."""
    return root / f"iter_{iteration:07d}"


def latest(root: Path) -> Path:
    """The newest whole checkpoint in `root`.

    Raises:
        ValueError: no checkpoint there, or the one that is named is missing.
    """
    marker = root / LATEST_CHECKPOINT_FILE
    try:
        folder = iteration_folder(root, int(marker.read_text(encoding="utf-8").strip()))
    except (OSError, ValueError):
        raise ValueError(
            f"{root} holds no checkpoint: {marker} is missing or names no iteration; give the folder of an earlier --save"
        ) from None
    for candidate in (folder, _aside(folder)):
        if (candidate / state_file()).is_file():
            return candidate
    if (folder / "state.pt").is_file():
        raise ValueError(f"{folder} was written by an earlier version of this code (state.pt), which this one does not read")
    raise ValueError(f"{marker} names {folder.name}, but {folder / state_file()} is missing; restore it or name an older iteration there")


def _rng_state() -> dict[str, Any]:
    version, keys, *rest = numpy.random.get_state(legacy=True)
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tensor_parallel": get_cuda_rng_tracker().get_states(),  # what the attention core's dropout draws from
        "numpy": [version, torch.from_numpy(keys.astype("int64")), *rest],  # type: ignore[union-attr]
        "python": [python_version, list(python_keys), python_gauss],
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu())
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    version, keys, *rest = state["numpy"]
    numpy.random.set_state((version, keys.numpy().astype("uint32"), *rest))
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))


def _model_state(model: nn.Module) -> dict[str, Any]:
    # megatron-core's linear layers leave an empty `_extra_state`, which says nothing.
    return {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}


def save(training: Training, root: Path) -> Path:
    """Write the checkpoint of the current iteration; collective. The first data-parallel rank of each part of the model writes it.

    Returns:
        Its folder.

    Raises:
        ValueError: on every rank, where one cannot write (full disk, permissions); the last checkpoint is as it was.
    """
    folder = iteration_folder(root, training.iteration)
    partial = folder.with_name(folder.name + ".partial")
    rank = torch.distributed.get_rank()
    state = _shared_state(training)  # under ZeRO the ranks bring their parts together

    def make_folder() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(state, partial / _own_state_file())
        torch.save(_rng_state(), partial / _own_rng_file())

    def publish() -> None:
        if rank == 0:
            _publish(partial, folder, root)

    for work in (make_folder, write, publish):
        _all_or_none(work, f"cannot save to {folder}: {{}}; free space or choose another --save")
    return folder


def _all_or_none(work: Callable[[], T], message: str = "{}") -> T:
    """`work()` on every rank, then a meeting: where it failed on one, all raise, and none waits for the others for ever."""
    result, problem = None, None
    try:
        result = work()
    except (OSError, RuntimeError, ValueError) as error:  # torch.save reports a full disk as a RuntimeError
        problem = str(error)
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    first = next((p for p in problems if p is not None), None)
    if first is not None:
        raise ValueError(message.format(first))
    return cast("T", result)


def _publish(partial: Path, folder: Path, root: Path) -> None:
    """Bring the finished folder to its name, then move the marker; at every moment one of the two names a whole checkpoint."""
    for file in partial.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    aside = _aside(folder)
    if folder.exists():  # a run that was started again has come by here before
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial.rename(folder)
    marker = root / (LATEST_CHECKPOINT_FILE + ".partial")
    marker.write_text(str(int(folder.name.removeprefix("iter_"))), encoding="utf-8")
    marker.rename(root / LATEST_CHECKPOINT_FILE)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced")


def _shared_state(training: Training) -> dict[str, Any]:
    return {
        "version": VERSION,
        "torch": str(torch.__version__),
        "config": config_to_dict(training.config),
        "vocab_size": training.vocab_size,
        "iteration": training.iteration,
        "consumed_samples": training.consumed_samples,
        "skipped_steps": training.optimizer.skipped_steps,
        "model": _model_state(training.model),
        "optimizer": training.optimizer.state_dict(),
        "grad_sync": training.grad_sync.state_dict(),
        "schedule": training.schedule.state_dict(),
    }


def _load_file(file: Path, remedy: str, mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises a different type for each kind of damage
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be read ({first_line}); {remedy}") from None


def _read(folder: Path, name: str, mmap: bool = False) -> dict[str, Any]:
    file = folder / name
    remedy = f"name an older iteration in {LATEST_CHECKPOINT_FILE}"
    state = _load_file(file, remedy, mmap)
    missing = [key for key in _KEYS if key not in state] if isinstance(state, dict) else list(_KEYS)
    if missing:
        raise ValueError(f"{file} is damaged or no checkpoint: it lacks {', '.join(missing)}; {remedy}")
    if state["version"] != VERSION:
        raise ValueError(f"{folder} has checkpoint version {state['version']}; this code reads version {VERSION}")
    return state


def _check_same_model(saved: dict[str, Any], training: Training) -> None:
    """ValueError naming every setting that gives the saved numbers another meaning."""
    config, finetune = training.config, training.config.checkpoint.finetune
    now, then = config_to_dict(config)["model"], saved["config"].get("model", {})
    free = _FREE | ({"seq_length"} if finetune and config.model.position_embedding_type == "rope" else set())
    differing = [f"{flag(k)} {v} (saved: {then.get(k)})" for k, v in now.items() if k not in free and then.get(k) != v]
    differing += _other_grid(saved, config)
    if saved["vocab_size"] != training.vocab_size:
        differing.append(f"a tokenizer of {training.vocab_size} tokens (saved: {saved['vocab_size']})")
    was = config_from_dict(saved["config"]).precision
    if not finetune and was.name != config.precision.name:
        differing.append(f"precision {config.precision.name} (saved: {was.name}; --finetune takes over the weights alone)")
    elif not finetune and was.fp8_scaling != config.precision.fp8_scaling:
        differing.append(f"--fp8-scaling {config.precision.fp8_scaling} (saved: {was.fp8_scaling})")
    elif not finetune and (was.bf16_linears or ()) != (config.precision.bf16_linears or ()):
        mine, theirs = (" ".join(linears or ()) or "none" for linears in (config.precision.bf16_linears, was.bf16_linears))
        differing.append(f"linear layers in BF16: {mine} (saved: {theirs}; it is taken over without --bf16-linears and --fp8-min-gain 0)")
    batch, before = config.global_batch_size(torch.distributed.get_world_size()), saved["consumed_samples"]
    if not finetune and batch * saved["iteration"] != before:
        differing.append(f"--global-batch-size {batch} (saved: {before // max(1, saved['iteration'])})")
    if differing:
        raise ValueError(f"the checkpoint in {config.checkpoint.load} does not fit: {'; '.join(differing)}. Give the saved values")


def _other_grid(saved: dict[str, Any], config: Config) -> list[str]:
    """The settings that cut the model into other parts than the saved one was cut into."""
    was, now = config_from_dict(saved["config"]).parallel, config.parallel
    names = [name for name in _GRID if name != "tp_wire" or not config.checkpoint.finetune]  # which leaves the scales behind
    return [f"{flag(k)} {getattr(now, k)} (saved: {getattr(was, k)})" for k in names if getattr(was, k) != getattr(now, k)]


def _check_finite(name: str, x: torch.Tensor, folder: Path) -> None:
    bad = int((~fp32_values(x).isfinite()).sum())
    if bad:
        raise ValueError(f"{folder}: {name} holds {bad} values that are NaN or infinite; load an older checkpoint")


def _check_weights(weights: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """ValueError naming the first weight that is missing, of another shape, or not finite."""
    for name, p in model.named_parameters():
        found = weights.get(name)
        if not isinstance(found, torch.Tensor) or found.shape != p.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else "missing"
            raise ValueError(f"{folder} is damaged: {name} is {shape}, the model wants {tuple(p.shape)}; load an older checkpoint")
        _check_finite(name, found, folder)


def _judged(training: Training) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """This rank's part of the checkpoint and its random state, after everything that a ValueError has to say about them."""
    settings = training.config.checkpoint
    assert settings.load is not None
    folder = latest(Path(settings.load))
    # The grid is judged by the first part, which every grid has; then each rank takes its own.
    _check_same_model(_read(folder, state_file(), mmap=True), training)
    saved = _read(folder, _own_state_file())
    _check_weights(saved["model"], training.model, folder)
    if not settings.finetune and not settings.no_load_optim:
        for index, state in saved["optimizer"]["state"].items():
            for key, value in state.items():
                _check_finite(f"{key} of the optimizer's parameter {index}", value, folder)
    rng = folder / _own_rng_file()
    if settings.finetune or settings.no_load_rng:
        return saved, None
    if not rng.is_file():
        print(f"{rng} is missing: this rank's random state (dropout) starts from --seed", flush=True)
        return saved, None
    return saved, _load_file(rng, "resume with --no-load-rng")


def saved_bf16_linears(config: Config) -> tuple[str, ...] | None:
    """The linear layers that are BF16 in the checkpoint that `config` resumes; None where it resumes none. ValueError for a damaged one."""
    if config.checkpoint.load is None or config.checkpoint.finetune:
        return None
    saved = _read(latest(Path(config.checkpoint.load)), state_file(), mmap=True)
    return config_from_dict(saved["config"]).precision.bf16_linears or ()


def load(training: Training) -> None:
    """Resume from `--load`: the newest checkpoint there; with `--finetune` the weights alone, at iteration 0. Collective.

    Raises:
        ValueError: on every rank, for no or a damaged checkpoint, or one of another model, precision or grid. Nothing has changed then.
    """
    settings = training.config.checkpoint
    saved, rng_state = _all_or_none(lambda: _judged(training))
    weights = saved["model"]
    if settings.finetune:
        weights = {key: value for key, value in weights.items() if ".scaling." not in key}
    if settings.finetune or settings.no_load_optim:
        training.optimizer.restart()
        for name, p in training.model.named_parameters():
            training.optimizer.init_master(p, weights[name])
    else:
        hyper = [{key: group[key] for key in _HYPER} for group in training.optimizer.param_groups]
        training.optimizer.load_state_dict(saved["optimizer"])
        for group, values in zip(training.optimizer.param_groups, hyper, strict=True):
            group.update(values)
        training.optimizer.skipped_steps = saved["skipped_steps"]
        training.grad_sync.load_state_dict(saved["grad_sync"])
    training.model.load_state_dict(weights, strict=False)  # megatron-core's empty `_extra_state` is not saved
    if settings.finetune:
        return
    # Only the place in the schedule is taken over: its shape, like every hyper-parameter, is what this run's flags say.
    training.schedule.settle()
    training.schedule.num_steps = saved["schedule"]["num_steps"]
    training.schedule.step(0)
    training.iteration = saved["iteration"]
    training.consumed_samples = saved["consumed_samples"]
    # All who share a part of the data must draw the same dropout where they hold the same activations.
    known = torch.tensor(rng_state is not None, dtype=torch.int32, device=process_groups.device())
    torch.distributed.all_reduce(known, torch.distributed.ReduceOp.MIN, parallel_state.get_model_parallel_group())
    if rng_state is not None and known:
        _restore_rng(rng_state)


def load_for_inference(path: str | Path) -> tuple[nn.Module, Config, Tokenizer]:
    """Model in evaluation mode, configuration and tokenizer of the newest checkpoint in `path`, for one process.

    Makes the process groups megatron-core asks for, of one rank, where there are none.
    """
    folder = latest(Path(path))
    saved = _read(folder, state_file())
    config = config_from_dict(saved["config"])
    parts = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    if parts > 1:
        raise ValueError(
            f"{folder} holds a model cut into {parts} parts by tensor and pipeline parallelism; sampling takes one that was saved with "
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
        )
    if not torch.distributed.is_initialized():
        process_groups.initialize(config)
    model = build_model(config, build_recipe(config.precision), saved["vocab_size"])
    _check_weights(saved["model"], model, folder)
    model.load_state_dict(saved["model"])
    for layer in model.modules():
        if isinstance(layer, FP8Gemm):
            layer.take_initial_weight()  # no master will start from it
    return model.eval(), config, build_tokenizer(config.data, config.model.vocab_size)
